"""Processor levels: results at every level that this machine can simulate.

A level below the machine's own is simulated in a child process: environment variables limit ATen,
oneDNN and numba to the instruction sets of an older processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
from needs import needs

from warmd.jobs.compute import levels as module, native, onednn
from warmd.jobs.compute.levels import Levels, instructions, levels
from warmd.jobs.compute.linear_forms import int8_linear
from warmd.jobs.compute.linears import served_precision

HASWELL = "avx avx2 bmi bmi2 cmov cx16 f16c fma fxsr lzcnt mmx movbe popcnt sse sse2 sse3 sse4.1"
HASWELL += " sse4.2 ssse3 xsave 64bit"
SKYLAKE = HASWELL + " avx512f avx512bw avx512cd avx512dq avx512vl"


def capped(cpu: str, features: str, onednn_isa: str, aten: str) -> dict[str, str]:
    return {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features.split()),
        "ONEDNN_MAX_CPU_ISA": onednn_isa,
        "ATEN_CPU_CAPABILITY": aten,
    }


# Name -> the processor flags that simulating the level requires, and its environment variables.
LEVELS = {
    "AVX-512 VNNI BF16": (
        {"avx512f", "avx512_vnni", "avx512_bf16"},
        capped("cooperlake", f"{SKYLAKE} avx512vnni avx512bf16", "AVX512_CORE_BF16", "avx512"),
    ),
    "AVX-512 VNNI": (
        {"avx512f", "avx512_vnni"},
        capped("cascadelake", f"{SKYLAKE} avx512vnni", "AVX512_CORE_VNNI", "avx512"),
    ),
    "AVX-512": ({"avx512f"}, capped("skylake-avx512", SKYLAKE, "AVX512_CORE", "avx512")),
    "AVX2 AVX-VNNI": (
        {"avx2", "fma", "avx_vnni"},
        capped("alderlake", f"{HASWELL} avxvnni", "AVX2_VNNI", "avx2"),
    ),
    "AVX2": ({"avx2", "fma"}, capped("haswell", HASWELL, "AVX2", "avx2")),
    "torch alone": (set(), {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}),
}

EXACT = """
import torch
from warmd.jobs.compute.levels import levels
from warmd.jobs.compute.linear_forms import int8_linear
generator = torch.Generator().manual_seed(0)
if levels().int8 is not None:
    for outputs, inputs in ((64, 64), (200, 96), (1152, 896), (130, 4864)):
        # The largest of each row is 127, so a unit is 1 and sums are of integers.
        weight = torch.randint(-127, 128, (outputs, inputs), generator=generator).float()
        x = torch.randint(-127, 128, (70, inputs), generator=generator).float()
        weight[:, 0], x[:, 0] = 127, -127
        weight[:9], x[:9] = 127, -127  # what saturates where anything does
        exact = (x.double() @ weight.double().T)
        layer = int8_linear([weight[:50], weight[50:]], None)
        for rows in (1, 2, 5, 6, 7, 13, 64, 70):
            found = layer(x[:rows]).double()
            assert (found - exact[:rows]).abs().max() <= 2e-7 * exact.abs().max(), (outputs, inputs)
print(levels().instructions, levels().int8)
"""


GROUPS = """
import hashlib, torch
from warmd.jobs.compute import native
generator = torch.Generator().manual_seed(0)
found = hashlib.sha256()
if native.is_available():
    from warmd.jobs.compute.native import panels
    for outputs, inputs in ((64, 64), (200, 97), (130, 4864)):
        weight = torch.randn(outputs, inputs, generator=generator)
        x = torch.randn(13, inputs, generator=generator)
        for make in (panels.grouped_int8_linear, panels.grouped_int4_linear):
            found.update(make([weight], None)(x).numpy().tobytes())
print(found.hexdigest())
"""


def play(level: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a child at a level; skips one that is above this machine."""
    flags, variables = LEVELS[level]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    has = next((line for line in lines if line.startswith("flags")), "").split()
    if missing := flags - set(has):  # a processor can be capped to lower levels, not to higher ones
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    if level == instructions():  # nothing to cap: a child would repeat the same tests
        pytest.skip("the machine's own level, at which all other tests in tests/compute run")
    paths = list(sys.path)
    if level == "torch alone":
        (tmp_path / "numba.py").write_text("raise ImportError('no numba, as a test has it')")
        paths.insert(0, str(tmp_path))
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.nightly(
    part="levels", catches="a kernel that is wrong on an older processor than this one"
)
@pytest.mark.parametrize("level", LEVELS)
def test_int8_sums_are_exact_at_every_level(level, tmp_path):
    environment = play(level, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", EXACT],
        env=environment,
        check=True,
        timeout=200,
        stdout=-1,
        text=True,
    )
    if level != "torch alone":
        assert done.stdout.startswith(f"{level} ")
    if level.startswith("AVX2"):  # no kernel of ours reads the weights that oneDNN packs there
        assert done.stdout.split()[-1] == "warmd"


@pytest.mark.nightly(
    part="levels", catches="a processor on which weights in groups give other bits than on this one"
)
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "torch alone"])
def test_weights_in_groups_give_the_same_bits_at_every_level(level, tmp_path):
    environments = (os.environ, play(level, tmp_path))
    here, there = (
        subprocess.run([sys.executable, "-c", GROUPS], env=each, check=True, stdout=-1).stdout
        for each in environments
    )
    assert here == there


@pytest.mark.nightly(
    part="levels", catches="a kernel that is wrong on an older processor than this one"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
def test_results_are_right_at_every_instruction_set_level(level, tmp_path):
    environment = play(level, tmp_path)
    files = ["compute/test_linears.py", "engine/test_scheduler.py"]
    if level != "torch alone":
        files.append("compute/test_native.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += ["-k", "not cuda"]  # which no level changes
    done = subprocess.run(
        [*command, *(str(Path(__file__).parents[1] / name) for name in files)],
        env=environment,
        stdout=-1,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_int8_sums_are_exact_here():
    exec(EXACT, {})


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of the measurement, in a folder that other processes do not use meanwhile."""
    monkeypatch.setattr(module, "cache", SimpleNamespace(folder=lambda: tmp_path))
    module._levels.cache_clear()
    found = module._path()
    assert found is not None
    yield found
    module._levels.cache_clear()


def test_levels_are_measured_once_and_cached(path):
    found = levels()
    assert Levels(**orjson.loads(path.read_bytes())) == found
    module._levels.cache_clear()
    assert levels() == found
    assert found.float32 in ("warmd", "onednn", "torch")
    assert set(found.reasons) >= {
        name for name, kernel in (("bf16", found.bfloat16), ("int8", found.int8)) if kernel is None
    }


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"processor": "another"}'])
def test_a_damaged_cache_of_levels_is_measured_again(content, path):
    found = levels()
    path.write_bytes(content)
    module._levels.cache_clear()
    again = levels()
    assert (again.processor, again.instructions) == (found.processor, found.instructions)
    assert Levels(**orjson.loads(path.read_bytes())) == again


@pytest.mark.slow
def test_without_memory_to_measure_library_kernels_are_used_and_the_next_process_measures(
    path, monkeypatch
):
    with monkeypatch.context() as without_memory:
        without_memory.setattr(module, "measure", lambda: torch.empty(2**50))
        found = levels()
    assert found.float32 != "warmd"
    assert (found.int8, found.bfloat16) == (None, None)
    assert "allocate memory" in found.summary()["int8"]
    assert not path.exists()
    module._levels.cache_clear()
    assert levels().reasons != found.reasons


def test_a_precision_is_served_if_a_kernel_for_it_was_measured_to_be_faster():
    weight = torch.ones(4, 4)
    for requested, kernel in (
        ("int4", levels().int4),
        ("int8", levels().int8),
        ("bf16", levels().bfloat16),
        ("native", None),
    ):
        assert served_precision(requested, weight) == (requested if kernel else "native")


@pytest.mark.parametrize("are_read", [True, False])
def test_a_kernel_on_whose_weights_steps_are_fused_comes_first(are_read, monkeypatch):
    needs(native.is_available(), "numba")
    from warmd.jobs.compute.native import panels

    monkeypatch.setattr(module, "_ratio", lambda one, other, rows: 0.5)  # all are equally fast
    for name in ("reads_onednn_bfloat16", "reads_onednn_int8"):
        monkeypatch.setattr(panels, name, lambda: are_read)
    found = module.measure()
    assert found.bfloat16 == ("units" if are_read and onednn.has_bfloat16() else "storage")
    if panels.has_int8():
        assert found.int8 == ("onednn" if are_read and onednn.has_exact_int8() else "warmd")


def test_a_kernel_is_measured_until_its_best_time_repeats():
    """At first it seems to be slow, as beside other processes: the best of seven is 3 ms."""
    slow_ms = iter([1, 12, 10, 8, 6.5, 5, 4, 3])  # the first call is no trial

    def computing(ms: float) -> torch.Tensor:
        end = time.thread_time() + ms / 1000
        while time.thread_time() < end:
            pass
        return torch.zeros(1)

    ratio = module._ratio(lambda x: computing(next(slow_ms, 1)), lambda x: computing(1), rows=1)
    assert ratio == pytest.approx(1, abs=0.2)


def test_every_int8_kernel_gives_the_same_bits():
    """Sums of integers are exact, so the kernel does not matter: warmd's and oneDNN's are equal."""
    needs(native.is_available(), "numba")
    from warmd.jobs.compute.native import panels
    from warmd.jobs.compute.quantized import Int8Linear

    if not (panels.has_int8() and onednn.has_exact_int8()):
        # Without VNNI oneDNN's sums saturate, and without AVX2 warmd has no kernel: then there is
        # no second exact kernel to compare with. On every processor the kernel that is served is
        # compared with exact sums by test_int8_sums_are_exact_here.
        pytest.skip("one kernel alone has exact sums on this processor")
    weights, bias = [torch.randn(100, 192), torch.randn(28, 192)], torch.randn(128)
    x = torch.randn(9, 192)
    assert torch.equal(panels.int8_linear(weights, bias)(x), Int8Linear(weights, bias)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 64), (200, 97), (130, 4864), (1, 1)])
def test_panel_layers_equal_torchs_for_any_size(sizes, dtype):
    needs(native.is_available(), "numba")
    from warmd.jobs.compute.native import panels

    torch.manual_seed(0)
    outputs, inputs = sizes
    weights = [torch.randn(outputs, inputs, dtype=dtype), torch.randn(3, inputs, dtype=dtype)]
    bias = torch.randn(outputs + 3, dtype=dtype)
    whole = torch.cat(weights)
    for rows in (1, 5, 6, 7, 40):
        x = torch.randn(rows, inputs)
        exact = torch.nn.functional.linear(x, whole.float(), bias.float())
        rounded = torch.nn.functional.linear(x, whole.bfloat16().float(), bias.float())
        float32 = panels.float32_linear(weights, bias, k_block=inputs)
        torch.testing.assert_close(float32(x), exact, rtol=1e-4, atol=1e-3)
        storage = panels.bfloat16_linear(weights, bias)
        torch.testing.assert_close(storage(x), rounded, rtol=1e-4, atol=1e-3)
        if panels.has_int8():
            eight = int8_linear(weights, bias)(x)
            assert (eight - exact).norm() <= 0.03 * exact.norm()
