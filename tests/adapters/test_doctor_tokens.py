"""Our tokens beside a replica's own."""

import aiohttp
import msgspec
import pytest

from kvroute.adapters.doctor_tokens import PROMPTS, Readers, Tokens, first_difference
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.adapters.tokens import WHOLE, open_reader
from kvroute.errors import ConfigError
from kvroute.fake.server import build_replica, serve_replica
from kvroute.kv.chain import root_of, tokens_of
from kvroute.routing.replica import ModelCard
from tests.adapters.between import between
from tests.tokenizer_files import tokenizer_directory

pytestmark = pytest.mark.slow  # large files and pictures


@pytest.fixture
async def replica():
    runner, url = await serve_replica(build_replica(model="m"))
    yield url
    await runner.cleanup()


async def compare(url, setting):
    """Return what comparing a replica with files gives."""
    readers = Readers(setting)
    async with aiohttp.ClientSession() as session:
        try:
            reader = await readers.of(ModelCard("m"))
            return await Tokens(reader, ReplicaClient(session, url, None, 5.0), "m").compared()
        finally:
            await readers.close()


async def tokens_by_kind(directory):
    """Tokenise every prompt with a model's files: a /tokenize answer by the kind of its question."""
    reader = await open_reader(str(directory), None, "m", None)
    await reader.start()
    found = {}
    for name, prompt in PROMPTS.items():
        read = await reader.read(prompt, block_size=WHOLE, root=root_of(""))
        assert read.exact, name
        found[name] = list(memoryview(read.tail).cast("I"))
    await reader.close()
    return found


async def test_equal_files_agree(replica, tmp_path):
    """A replica that tokenises with the same files agrees on a chat, a system prompt, a tool call and a completion."""
    directory = tokenizer_directory("qwen3")
    found = await tokens_by_kind(directory)
    answers = iter(found.values())

    def edit(path, status, body):
        return 200, msgspec.json.encode({"tokens": next(answers)})

    async with between([replica], edit) as url:
        compared = await compare(url, str(directory))
    assert [(one.prompt, one.ours, one.theirs, one.differs_at) for one in compared] == [
        (name, len(ids), len(ids), None) for name, ids in found.items()
    ]


async def test_other_files_are_found_out(replica):
    """A replica with another tokenizer differs, and where it begins to differ is told."""
    compared = await compare(replica, str(tokenizer_directory("qwen3")))
    assert all(one.differs_at is not None and one.ours != one.theirs for one in compared)


async def test_without_files_the_replica_speaks(replica):
    """Nothing is ours then, and why is told."""
    compared = await compare(replica, "auto")
    assert all(one.ours is None and one.theirs and "no files" not in one.why for one in compared)
    assert "tokenizer.json" in compared[0].why


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    """As `kvroute serve` refuses it."""
    with pytest.raises(ConfigError, match="tokenizer"):
        Readers(str(tmp_path))


@pytest.mark.parametrize(
    ("one", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_first_difference(one, other, at):
    """A prompt that ends early differs where it ends."""
    assert first_difference(tokens_of(one), tokens_of(other)) == at
