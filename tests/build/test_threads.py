"""Threads come from torch's one OpenMP runtime, as many as torch says, and survive fork."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trees import python

LAYER = """
import json, os, torch, petit_plugin as pp
def linear(rows=64):
    torch.manual_seed(0)
    w = pp.pack_mxfp4(torch.randint(0, 256, (512, 64), dtype=torch.uint8), torch.full((512, 4), 127, dtype=torch.uint8))
    x = torch.ones(rows, 128)
    return pp.linear(x, w)
def runtimes():
    lines = open("/proc/self/maps").read().splitlines()
    paths = {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp", "libomp")))
def in_child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    import time
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"
"""


def one_runtime(tree: Path | None = None) -> None:
    code = (
        LAYER
        + """
before = runtimes()
torch.set_num_threads(2)
linear()
torch.nn.functional.linear(torch.ones(512, 512), torch.ones(512, 512))
print(json.dumps([before, runtimes(), pp._native.openmp_runtime()]))
"""
    )
    before, after, used = json.loads(python(code, tree=tree))
    assert after == before, "our kernels brought an OpenMP runtime of their own"
    assert len(after) == 1
    assert str(Path(used).resolve()) == after[0]


def test_one_openmp_runtime_in_the_process() -> None:
    one_runtime()


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_torch_says(threads: int) -> None:
    """Counted as threads of the process: torch itself has run nothing yet."""
    code = (
        LAYER
        + f"""
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads({threads})
start = count()
linear()
print(count() - start)
"""
    )
    assert int(python(code)) == threads - 1


def test_affinity_of_one_core_does_not_matter() -> None:
    code = (
        LAYER
        + """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(2)
print(float(linear().sum()))
"""
    )
    plain = LAYER + "print(float(linear().sum()))"
    assert python(code) == python(plain)


def test_fork_after_import() -> None:
    code = (
        LAYER
        + """
def body():
    torch.set_num_threads(2)
    start = len(os.listdir("/proc/self/task"))
    assert torch.equal(linear(), linear())
    assert len(os.listdir("/proc/self/task")) == start + 1  # the child has threads of its own
print(in_child(body), in_child(body))
"""
    )
    assert python(code).split() == ["0", "0"]


def test_fork_after_use() -> None:
    """The parent's threads do not exist in the child; it must neither wait for them nor differ in a bit, and
    it says that it is slower."""
    code = (
        LAYER
        + """
torch.set_num_threads(2)
expected = linear()
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))
logging.getLogger("petit_plugin").addHandler(Lines())
def body():
    assert torch.equal(linear(), expected) and torch.equal(linear(), expected)
    assert len(lines) == 1 and lines[0][0] == "WARNING" and "lost in a fork" in lines[0][1], lines
status = in_child(body)
assert torch.equal(linear(), expected)
print(status)
"""
    )
    assert python(code).strip() == "0"


def test_inside_a_parallel_region_of_its_own_threads() -> None:
    """Many Python threads at once: the GIL is released, each call has its own team, results do not mix."""
    code = (
        LAYER
        + """
from concurrent.futures import ThreadPoolExecutor
expected = {rows: linear(rows) for rows in (1, 5, 40)}
w = pp.pack_mxfp4(torch.full((64, 64), 0x22, dtype=torch.uint8), torch.full((64, 4), 127, dtype=torch.uint8))
def work(i):
    x = torch.full((3, 128), float(i))
    return bool((pp.linear(x, w) == 128 * i).all())
with ThreadPoolExecutor(4) as pool:
    print(all(pool.map(work, range(200))))
"""
    )
    assert python(code).strip() == "True"
