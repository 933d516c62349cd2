"""Templates that render turn by turn are told from those that only look like it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from kvroute.adapters.template import ChatTemplate
from kvroute.adapters.turnwise import turns_of
from tests.small_model import TEMPLATE
from tests.tokenizer_files import load_templates
from tests.vllm.make_model import CHAT_TEMPLATE

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TURNWISE = {
    "plain": TURN,
    "small": TEMPLATE,
    "tools in a system header": CHAT_TEMPLATE,
    "a foot": TURN + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "the first message apart": "{{ messages[0].content | trim }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "another name": "{% set ms = messages %}{% for m in ms %}{{ loop.index }}{% endfor %}",
    "another name, by the first message": (
        "{% if messages[0].role == 'system' %}{% set ms = messages[1:] %}{% set s = messages[0].content %}"
        "{% else %}{% set ms = messages %}{% endif %}{{ s }}"
        "{% for m in ms %}{% if loop.first %}!{% endif %}{{ loop.index0 }}{{ m.content }}{% endfor %}"
    ),
    "a loop of its own": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if not loop.last %},{% endif %}"
        "{{ c | tojson }}{% break %}{% endfor %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ loop.index0 }}{% endfor %}"
    ),
    "names from before": (
        "{% if not word is defined %}{% set word = 'w' %}{% endif %}{% set twice = word + word %}"
        "{% for m in messages %}{{ twice }}{% set word = m.role %}{{ word }}{% endfor %}{{ word }}"
    ),
    "a constant namespace": "{% set n = namespace(a='x') %}{% for m in messages %}{{ n.a }}{{ m.role }}{% endfor %}",
}
REFUSED = {
    "the last": "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
    "the last by name": "{% for m in messages %}{{ loop['last'] }}{% endfor %}",
    "the loop itself": "{% for m in messages %}{{ loop }}{% endfor %}",
    "how many": "{% for m in messages %}{{ messages | length }}{% endfor %}",
    "how many, before": "{{ messages | length }}" + TURN,
    "how many, behind": TURN + "{{ messages | length }}",
    "the last from the end": "{{ messages[-1].role }}" + TURN,
    "the second": "{{ messages[1].role }}" + TURN,
    "the first, in each": "{% for m in messages %}{{ messages[0].role }}{% endfor %}",
    "a name for the first, in each": "{% set f = messages[0].role %}{% for m in messages %}{{ f }}{% endfor %}",
    "a name that stands for another": "{% set a = messages[0].role %}{% set b = a %}" + TURN + "{{ b }}",
    "the one before": "{% for m in messages %}{{ loop.previtem.role }}{% endfor %}",
    "what changed": "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
    "in turn": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "a counter": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
    "a joiner": "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "a clock": "{{ strftime_now('%S') }}" + TURN,
    "a clock in a pocket": "{% set d = {'f': strftime_now} %}{% for m in messages %}{{ d.f('%S') }}{% endfor %}",
    "chance": "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
    "an iterator": "{% set i = tools | select %}{% for m in messages %}{{ i | first }}{% endfor %}",
    "a macro": "{% macro f() %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ f() }}{% endfor %}",
    "a filtered loop": "{% for m in messages if m.role != 'system' %}{{ loop.index }}{% endfor %}",
    "an early end": "{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}",
    "an early end inside": "{% for m in messages %}{% for c in [] %}{% else %}{% break %}{% endfor %}{% endfor %}",
    "two loops": TURN + TURN,
    "backwards": "{% for m in messages | reverse %}{{ m.role }}{% endfor %}",
    "a part": "{% for m in messages[:3] %}{{ m.role }}{% endfor %}",
    "from the third": "{% for m in messages[2:] %}{{ m.role }}{% endfor %}",
    "parts of the first": "{% for m in messages[0].content %}{{ m }}{% endfor %}",
    "sometimes a name": "{% if tools %}{% set ms = messages %}{% endif %}{% for m in ms %}{{ m.role }}{% endfor %}",
    "messages anew": "{% set messages = messages[1:] %}" + TURN,
    "a slice of a slice": "{% set ms = messages[1:] %}{% for m in ms[1:] %}{{ m.role }}{% endfor %}",
    "a name from behind": "{% for m in messages %}{{ word }}{% endfor %}{% set word = 1 %}",
    "inside": "{% if tools %}" + TURN + "{% endif %}",
    "nothing": "hello",
}
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.sampled_from(["", "a", " b\n"]),
        },
        optional={"tool_calls": st.lists(st.sampled_from([{"function": {"name": "f", "arguments": {"x": 1}}}, {}]))},
    ),
    min_size=1,
    max_size=6,
)
variables = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans()},
    optional={
        "tools": st.sampled_from([None, [{"name": "é"}, {}]]),
        "word": st.sampled_from(["x", 5]),
        "bos_token": st.just("<s>"),
    },
)


def whole(source, values, chat):
    try:
        return ChatTemplate(source).render({**values, "messages": chat})
    except (TemplateError, TypeError):
        return None


def by_turns(turns, values, chat, cuts):
    """Render a chat's later messages in as many steps as there are cuts."""
    try:
        text, looped = turns.first(values, chat[0])
        places = sorted({1, *(cut for cut in cuts if 1 < cut < len(chat)), len(chat)})
        for start, end in pairwise(places):
            text += turns.later(values).text(chat[start:end], looped + start - 1)
        return text + turns.foot(values)
    except (TemplateError, TypeError):
        return None


@settings(deadline=None)
@pytest.mark.parametrize("name", TURNWISE)
@given(values=variables, chat=messages, cuts=st.sets(st.integers(1, 5)))
def test_turn_by_turn_is_the_whole(name, values, chat, cuts):
    """Wherever a conversation is cut, its parts are the text of the whole template, or both refuse."""
    turns = turns_of(TURNWISE[name])
    assert turns is not None
    assert by_turns(turns, values, chat, cuts) == whole(TURNWISE[name], values, chat)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused(name):
    """A template whose text for one message may depend on another, on their number or on the time is rendered whole."""
    assert turns_of(REFUSED[name]) is None


@pytest.mark.parametrize(("family", "is_turnwise"), [("qwen3", False), ("llama3_1", True), ("deepseek_v3", False)])
def test_real_templates(family, is_turnwise):
    """Qwen looks at the last question and at neighbours, DeepSeek counts in a namespace; Llama renders turn by turn."""
    assert (turns_of(load_templates(family)["default"]) is not None) is is_turnwise


EXPRESSIONS = st.sampled_from([
    "m.role", "m.content", "messages", "messages[0].role", "messages[1:]", "messages | length", "messages[-1].role",
    "loop.index", "loop.first", "loop.last", "loop.index0", "loop.length", "x", "y", "m", "tools", "not messages",
    "word", "n.v", "'c'",
])  # fmt: skip
NAMES = st.sampled_from(["x", "y", "m", "word", "n"])


def _statements(inner):
    blocks = st.lists(inner, max_size=3).map("".join)
    return (
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, EXPRESSIONS, blocks, blocks)
        | st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, blocks)
        | st.builds("{{% for {} in {} %}}{}{{% endfor %}}".format, NAMES, EXPRESSIONS, blocks)
    )


leaves = (
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS)
    | st.builds("{{% set {} = {} %}}".format, NAMES, EXPRESSIONS)
    | st.builds("{{% set n.v = {} %}}".format, EXPRESSIONS)
    | st.sampled_from(["text ", "{% set n = namespace(v=1) %}", "{% continue %}", "{% break %}"])
)
blocks = st.lists(st.recursive(leaves, _statements, max_leaves=4), max_size=3).map("".join)
iterables = st.sampled_from(
    ["messages"] * 4 + ["messages[1:]", "messages[1:] if messages[0].role == 'system' else messages", "x"]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(
    head=blocks,
    over=iterables,
    body=blocks,
    foot=blocks,
    values=variables,
    chat=messages,
    cuts=st.sets(st.integers(1, 5)),
)
def test_whatever_is_proved_holds(head, over, body, foot, values, chat, cuts):
    """Of any small template that passes the proof, the parts are the whole."""
    source = f"{head}H{{% for m in {over} %}}-{body}{{% endfor %}}F{foot}"
    try:
        turns = turns_of(source)
    except (TemplateError, SyntaxError):  # no template: `continue` outside a loop, for instance
        return
    if turns is not None:
        assert by_turns(turns, values, chat, cuts) == whole(source, values, chat)
