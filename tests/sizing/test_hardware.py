"""GPUs by name, and custom ones."""

import pytest

from kvroute.errors import ConfigError
from kvroute.sizing.hardware import GPUS, gpu, hardware_of


def test_every_gpu_names_its_source():
    """No figure without a source."""
    assert all(one.source and one.memory_bytes and one.bandwidth_bytes_s and one.flops for one in GPUS.values())


def test_an_unknown_gpu_lists_the_known():
    """The message tells what there is."""
    with pytest.raises(ConfigError, match="h100"):
        gpu("h1000")


def test_custom_hardware():
    """Units are GB, GB/s and TFLOP/s."""
    one = hardware_of({"name": "x", "memory_gb": 48, "bandwidth_gb_s": 864.5, "tflops": 362, "link_gb_s": 100})
    assert (one.memory_bytes, one.bandwidth_bytes_s, one.flops) == (48 * 10**9, 864_500_000_000, 362 * 10**12)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "memory_gb is missing"),
        ({"memory_gb": -80}, "memory_gb must be a number above 0"),
        ({"memory_gb": "80"}, "memory_gb must be a number"),
        ({"memory_gb": float("nan")}, "memory_gb must be a number"),
        ({"memory_gb": 80, "memory": 1}, "'memory' is not known"),
        ({"memory_gb": 80, "name": 3}, "name must be a string"),
    ],
)
def test_faults_of_custom_hardware(data, complaint):
    """Each names the field."""
    with pytest.raises(ConfigError, match=complaint):
        hardware_of(data)
