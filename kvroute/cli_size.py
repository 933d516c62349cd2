"""`kvroute size`: reads what the user points at, asks the sizing room, and prints.

Nothing heavy is imported on the way: rich only to print tables, YAML, HTTP and the metrics parser only where asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import Parallel, Share
from kvroute.sizing.report import BATCHES, LENGTHS, Report, Wishes

GB = 10**9
LIST_MAX = 32  # entries of a comma-separated flag
GPU_DEFAULT = "h100,h200"


@click.command()
@click.argument("model", required=False)
@click.option("--gpu", "gpus", default=GPU_DEFAULT, show_default=True, help="GPUs to compare, comma-separated.")
@click.option("--hardware", type=click.Path(path_type=Path), help="YAML file that describes a GPU.")
@click.option("--gpu-memory", type=float, metavar="GB", help="A GPU of your own: its memory,")
@click.option("--gpu-bandwidth", type=float, metavar="GB/S", help="memory bandwidth, and")
@click.option("--gpu-tflops", type=float, metavar="TFLOP/S", help="dense 16-bit compute.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--dp", default=1, show_default=True, help="Engines side by side.")
@click.option("--dcp", default=1, show_default=True, help="Decode-context-parallel ranks, out of --tp.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="auto, bfloat16, fp8, ...")
@click.option("--utilisation", "--gpu-memory-utilization", default=0.92, show_default=True, help="Share of the GPU.")
@click.option("--weights", type=float, metavar="GB", help="Size of the weights; counted from the shape without it.")
@click.option("--working", type=float, default=0.0, metavar="GB", help="Activations, CUDA graphs, on each GPU.")
@click.option("--context", default=",".join(map(str, LENGTHS)), show_default=True, help="Lengths to size, in tokens.")
@click.option("--batch", default=",".join(map(str, BATCHES)), show_default=True, help="Batches to time.")
@click.option("--max-model-len", type=int, help="As vLLM's.  [default: the model's context]")
@click.option("--max-num-batched-tokens", type=int, default=8192, show_default=True, help="As vLLM's.")
@click.option("--block-size", type=int, default=16, show_default=True, help="As vLLM's.")
@click.option("--no-hybrid", is_flag=True, help="The engine keeps window layers whole.")
@click.option("--mix", default="", metavar="SHARE:TOKENS,...", help="Traffic, such as 95%:8000,5%:64000.")
@click.option("--users", default=0, help="Users that share a prefix of --prefix-tokens.")
@click.option("--prefix-tokens", default=0, help="Tokens that they share.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with plots.")
@click.option("--log", type=click.Path(path_type=Path), help="Check a vLLM start-up log against MODEL.")
@click.option("--metrics", metavar="URL", help="Ask a running replica how close to its limit it is.")
@click.option("--list", "listing", is_flag=True, help="Name the presets and the GPUs.")
def size(model: str | None, **flags: Any) -> None:
    """Say what MODEL's KV cache takes and what fits: a folder, a config.json, a preset, or a replica's URL."""
    try:
        if flags["listing"]:
            _list()
        elif flags["log"] is not None:
            _check_log(model, flags)
        elif flags["metrics"]:
            _check_usage(model, flags)
        else:
            _size(model, flags)
    except ConfigError as error:
        raise click.ClickException(error.message) from None


def _size(name: str | None, flags: dict[str, Any]) -> None:
    from kvroute.adapters.size_io import read_model
    from kvroute.sizing.assemble import report_of

    model = read_model(_needed(name))
    report = report_of(model, _hardware(flags), _wishes(flags))
    if flags["html"] is not None:
        from kvroute.sizing.page import page_of

        _write(flags["html"], page_of(report, model))
    if flags["as_json"]:
        _json(report)
    elif flags["html"] is None:
        _tables(report)


def _check_log(name: str | None, flags: dict[str, Any]) -> None:
    from kvroute.adapters.size_io import read_log_text, read_model
    from kvroute.sizing.engine_log import read_log
    from kvroute.sizing.verdict import judge

    log = read_log(read_log_text(flags["log"]))
    model = read_model(_needed(name or log.served))  # the log names what the engine was told to load
    chosen = flags["gpus"] != GPU_DEFAULT or flags["gpu_memory"] is not None or flags["hardware"] is not None
    verdict = judge(log, model, _hardware(flags)[0] if chosen else None)
    if flags["as_json"]:
        _json({"log": log, "verdict": verdict})
    else:
        from rich.console import Console

        from kvroute.adapters.size_tables import print_verdict

        print_verdict(log, verdict, Console())
    if verdict.agrees is False:
        raise click.exceptions.Exit(1)


def _check_usage(name: str | None, flags: dict[str, Any]) -> None:
    from kvroute.adapters.size_io import read_model, read_usage
    from kvroute.sizing.remedies import headroom

    model = read_model(name) if name else None
    found = [headroom(usage, model) for usage in read_usage(flags["metrics"])]
    if flags["as_json"]:
        _json({"engines": found})
        return
    from rich.console import Console

    from kvroute.adapters.size_tables import print_headroom

    for number, one in enumerate(found):
        print_headroom(one, Console(), f"engine {number}: " if len(found) > 1 else "")


def _list() -> None:
    from kvroute.sizing.hardware import GPUS
    from kvroute.sizing.presets import PRESETS

    for name, one in PRESETS.items():
        click.echo(f"{name:24}{one.source}")
    click.echo("")
    for name, gpu in GPUS.items():
        click.echo(f"{name:24}{gpu.source}")


def _needed(name: str | None) -> str:
    if not name or not name.strip():
        raise ConfigError(
            "MODEL is missing: a folder, a config.json, a replica's URL or a preset (kvroute size --list)"
        )
    return name


def _hardware(flags: dict[str, Any]) -> list[Any]:
    from kvroute.adapters.size_io import read_hardware
    from kvroute.sizing.hardware import gpu, hardware_of

    if flags["hardware"] is not None:
        return [read_hardware(flags["hardware"])]
    if flags["gpu_memory"] is not None:
        own = {"memory_gb": "gpu_memory", "bandwidth_gb_s": "gpu_bandwidth", "tflops": "gpu_tflops"}
        return [hardware_of({field: flags[flag] for field, flag in own.items() if flags[flag] is not None})]
    if flags["gpu_bandwidth"] is not None or flags["gpu_tflops"] is not None:
        raise ConfigError("--gpu-bandwidth and --gpu-tflops describe a GPU of your own: give its --gpu-memory too")
    try:
        return [gpu(name.strip()) for name in _parts("--gpu", flags["gpus"])]
    except ConfigError as error:
        raise ConfigError(f"--gpu: {error}, or describe one with --gpu-memory") from None


def _wishes(flags: dict[str, Any]) -> Wishes:
    return Wishes(
        lengths=_numbers("--context", flags["context"]),
        batches=_numbers("--batch", flags["batch"]),
        cache_dtype=flags["kv_cache_dtype"],
        parallel=Parallel(flags["tp"], flags["pp"], flags["dp"], flags["dcp"]),
        utilisation=flags["utilisation"],
        weights_bytes=None if flags["weights"] is None else _bytes("--weights", flags["weights"]),
        working_bytes=_bytes("--working", flags["working"]),
        max_model_len=flags["max_model_len"],
        block_size=flags["block_size"],
        batched_tokens=flags["max_num_batched_tokens"],
        hybrid=not flags["no_hybrid"],
        users=flags["users"],
        prefix_tokens=flags["prefix_tokens"],
        mix=_mix(flags["mix"]),
    )


def _bytes(flag: str, value: float) -> int:
    if not 0 <= value <= 1e6:
        raise ConfigError(f"{flag}: {value} must be from 0 to 1,000,000 GB")
    return round(value * GB)


def _parts(flag: str, text: str) -> list[str]:
    parts = [part for part in text.split(",") if part.strip()]
    if not 1 <= len(parts) <= LIST_MAX:
        raise ConfigError(f"{flag}: from 1 to {LIST_MAX} entries, separated by commas")
    return parts


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    return tuple(_number(flag, part) for part in _parts(flag, text))


def _number(flag: str, text: str) -> int:
    digits = text.strip().replace("_", "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
        raise ConfigError(f"{flag}: {text.strip()[:40]!r} is not a whole number of tokens or sequences")
    return int(digits)


def _mix(text: str) -> tuple[Share, ...]:
    if not text:
        return ()
    shares = []
    for part in _parts("--mix", text):
        share, found, length = part.partition(":")
        try:
            value = float(share.strip().removesuffix("%")) / (100 if share.strip().endswith("%") else 1)
        except ValueError:
            found = ""
        if not found:
            raise ConfigError(f"--mix: {part.strip()[:40]!r} must be SHARE:TOKENS, such as 95%:8000")
        shares.append(Share(value, _number("--mix", length)))
    return tuple(shares)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    click.echo(f"written: {path}", err=True)


def _json(value: object) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _tables(report: Report) -> None:
    from rich.console import Console

    from kvroute.adapters.size_tables import print_report

    print_report(report, Console())
