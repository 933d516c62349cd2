"""Templates render as Hugging Face renders them, and are read as vLLM reads them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from kvroute.adapters.template import ChatTemplate, GenerationBlock
from tests.data_files import conversations
from tests.tokenizer_files import WITH_TEMPLATE, tokenizer_directory

PLAIN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
LOOP = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
MACRO = "{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}"

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "items", "b", "_c"]), inner, max_size=3)
    ),
    max_leaves=6,
)
reads = st.lists(
    st.sampled_from(
        [".a", ".items", ".b", "._c", "['a']", "['items']", "[0]", ".upper", ".format", "['__class__']", ".x.y"]
    ),
    max_size=3,
).map("".join)


def rendered(template, variables):
    """Return the text, or the name of the error."""
    try:
        return template.render(variables)
    except Exception as error:
        return type(error).__name__


@settings(deadline=None)
@given(values, reads, st.sampled_from(["", "|length", " is defined", " is none", "|string|upper", "()"]))
def test_short_ways_change_nothing(value, read, end):
    """Whatever a template reads of a value, the text or the error is that of the plain sandbox."""
    source = "{% for v in [value] %}{{ v" + read + end + " }}{{ loop.index0 }}{% endfor %}"
    variables = {"value": value}
    ours, theirs = rendered(ChatTemplate(source), variables), rendered(PLAIN.from_string(source), variables)
    assert (ours == theirs) or ("object at 0x" in ours and "object at 0x" in theirs)


@pytest.mark.parametrize("family", WITH_TEMPLATE)
def test_real_templates_render_as_in_the_plain_sandbox(family):
    """The templates of real models give the same text with and without the short ways."""
    source = json.loads((tokenizer_directory(family) / "tokenizer_config.json").read_text())["chat_template"]
    ours, theirs = ChatTemplate(source), PLAIN.from_string(source)
    for messages in conversations("tau_airline_text_a")[:10]:
        texts = [{**message, "content": message["content"] or ""} for message in messages]
        variables = {"messages": texts, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
        assert ours.render(variables) == theirs.render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x | tojson }}", '{"b": "<é&\'>", "a": [1]}'),
        ("{{ x | tojson(indent=1) }}", '{\n "b": "<é&\'>",\n "a": [\n  1\n ]\n}'),
        ("{{ x | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}", '{"a":[1],"b":"<\\u00e9&\'>"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("a{% generation %}{{ x.a[0] }}{% endgeneration %}b", "a1b"),
        ("{% set n = namespace(k=1) %}{% for i in [1, 2] %}{% set n.k = n.k + i %}{% endfor %}{{ n.k }}", "4"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ 'a,b'.split(',') | join('-') }}{{ '{}'.format(1) }}", "a-b1"),
        ("{{ x.items() | list | length }}{{ x.missing is defined }}", "2False"),
    ],
)
def test_filters_tags_and_globals_are_those_of_hugging_face(source, text):
    """No HTML escapes in JSON, its keyword arguments, loop controls, generation blocks, trimmed lines."""
    assert ChatTemplate(source).render({"x": {"b": "<é&'>", "a": [1]}}) == text


def test_the_date_is_the_local_one():
    """strftime_now writes the engine's own local time."""
    assert ChatTemplate("{{ strftime_now('%Y') }}").render({}) in {
        str(datetime.now().astimezone().year + n) for n in (0, -1)
    }


def test_a_template_may_refuse():
    """raise_exception ends the rendering with the template's own words."""
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render({})


@pytest.mark.parametrize("source", ["{{ x.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_the_sandbox_holds(source):
    """A template can neither change what it is given nor reach Python behind it."""
    with pytest.raises(SecurityError):
        ChatTemplate(source).render({"x": [1]})


@pytest.mark.parametrize(
    ("source", "wants_parts"),
    [
        (LOOP, True),
        (LOOP.replace("m.content", "m['content'] | list"), True),
        (LOOP.replace("in messages", "in messages[1:]"), True),
        ("{% set turns = messages[1:] %}{% set rest = turns %}" + LOOP.replace("in messages", "in rest"), True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (MACRO + "{{ show(m.content) }}{% endfor %}", True),
        (MACRO + "{{ show(x=m['content']) }}{% endfor %}", True),
        (MACRO + "{{ show(m.role) }}{% endfor %}", False),
        (MACRO.replace("x", "content") + "{{ show(m.role) }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
    ],
)
def test_a_loop_over_content_asks_for_parts(source, wants_parts):
    """Content is passed as parts exactly where the template loops over some message's content."""
    assert ChatTemplate(source).wants_parts == wants_parts
