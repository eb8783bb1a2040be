"""What a call that finds its plan passes through on the host: few files, few lines, whatever the face.

A number here may fall. One that grows says that a face or a plan has got a way of its own.
"""

import ast
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.cpu.host import compile as kernels
from tilewise.dispatch import plans
from tilewise.faces.sdpa import scaled_dot_product_attention

ROOT = Path(tilewise.__file__).parent
pytestmark = pytest.mark.skipif(kernels.unavailable() is not None, reason="no kernels of the CPU")


@pytest.fixture(autouse=True)
def one_thread():
    """Several take a pool of threads, and its file, where the work is worth it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def functions_entered(call):
    """Code objects of tilewise that a call enters."""
    entered = set()

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            entered.add(frame.f_code)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def body_lines(entered):
    """Lines of the functions entered, without their signatures, docstrings, comments and empty lines."""
    total = 0
    for path in {code.co_filename for code in entered}:
        text = Path(path).read_text()
        starts = {code.co_firstlineno for code in entered if code.co_filename == path}
        numbers = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.lineno - len(node.decorator_list) in starts:
                body = node.body[ast.get_docstring(node) is not None :]
                numbers.update(range(body[0].lineno, node.end_lineno + 1))
        source = [line.strip() for line in text.splitlines()]
        total += sum(source[n - 1] != "" and source[n - 1][0] != "#" for n in numbers)
    return total


def dense(requires_grad=False):
    return [torch.randn(1, 4, 4, 64, requires_grad=requires_grad) for _ in range(3)]


def attention():
    q, k, v = dense()
    return lambda: tilewise.attention(q, k, v)


def attention_with_gradient():
    q, k, v = dense(True)
    return lambda: tilewise.attention(q, k, v)


def sdpa():
    q, k, v = dense()
    return lambda: scaled_dot_product_attention(q, k, v)


def sdpa_with_gradient():
    q, k, v = dense(True)
    return lambda: scaled_dot_product_attention(q, k, v)


def varlen():
    x, starts = torch.randn(9, 4, 64), torch.tensor([0, 4, 9])
    return lambda: tilewise.attention_varlen(x, x, x, starts, starts)


def with_cache():
    x = torch.randn(1, 1, 4, 64)
    cache = tilewise.KVCache(1, 64, 4, 64, dtype=torch.float32)
    return lambda: tilewise.attention_with_cache(x, cache, x, x)


# Packed calls check lengths, which are values, and divide their work by them; a cache checks and writes.
@pytest.mark.parametrize(
    ("make", "files", "lines"),
    [
        (attention, 4, 150),
        (attention_with_gradient, 4, 150),
        (sdpa, 4, 150),
        (sdpa_with_gradient, 4, 150),
        (varlen, 11, 262),
        (with_cache, 12, 385),
    ],
)
def test_a_hit_is_short(make, files, lines):
    call = make()
    call()
    entered = functions_entered(call)
    assert len({code.co_filename for code in entered}) <= files, sorted(c.co_filename for c in entered)
    assert body_lines(entered) <= lines
    names = {code.co_name for code in entered}
    assert {"find", "matches", "run", "launch"} <= names  # it is the way of a plan
    assert not {"describe_signature", "choose", "_make_forward", "look"} & names  # and it was found


def test_the_first_call_is_longer():
    """The trace sees what a miss does."""
    plans.clear()
    call = attention()
    names = {code.co_name for code in functions_entered(call)}
    assert {"find", "_make_forward", "choose", "run"} <= names
