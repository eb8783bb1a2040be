"""Functions that are put together of others, so that all backends and derivatives have them.

What a `where` does not take must not overflow: 0 times its slope would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    z = x * beta
    found = z.recorder.add("maximum", z, 0.0) + torch.log1p(torch.exp(-abs(z)))
    return torch.where(z > threshold, x, found / beta)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = torch.expm1(torch.where(x > 0, 0.0, x) * input_scale) * alpha
    return torch.where(x > 0, x, below) * scale


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x))


def _logaddexp(a: Any, b: Any) -> Any:
    apart = torch.where(a == b, 0.0, -abs(a - b))  # of infinities too
    return torch.maximum(a, b) + torch.log1p(torch.exp(apart))


def _atan2(y: Any, x: Any) -> Any:
    is_far = (abs(y) == math.inf) & (abs(x) == math.inf)
    y, x = (torch.where(is_far, torch.where(t < 0, -1.0, 1.0), t) for t in (y, x))
    is_steep, half = abs(y) > abs(x), torch.where(y < 0, -math.pi / 2, math.pi / 2)
    by = torch.where(is_steep, y, torch.where(x == 0, 1.0, x))  # not 0
    angle = torch.atan(torch.where(is_steep, x, torch.where((x == 0) & (y == 0), 0.0, y)) / by)
    return torch.where(is_steep, half - angle, angle + torch.where(x < 0, 2 * half, 0.0))


def _log_ndtr(x: Any) -> Any:
    """Of what erfc of a large number rounds to 0, by what that is e^(-x^2) times of."""
    z = x * math.sqrt(0.5)
    is_far = z < -1
    far = torch.log(0.5 * torch.special.erfcx(torch.where(is_far, -z, 1.0))) - z * z
    return torch.where(is_far, far, torch.log1p(-0.5 * torch.erfc(torch.where(is_far, 0.0, z))))


def _sinc(x: Any) -> Any:
    z = torch.where(x == 0, 1.0, x) * math.pi
    return torch.where(x == 0, 1.0, torch.sin(z) / z)


def _logit(x: Any, eps: float | None = None) -> Any:
    x = x if eps is None else torch.where(x < eps, eps, torch.where(x > 1 - eps, 1 - eps, x))
    return torch.log(x) - torch.log1p(-x)


def _xlogy(a: Any, b: Any, log: Callable[[Any], Any] = torch.log) -> Any:
    found = log(b)
    is_hidden = (a == 0) & (b == b) & ~(abs(found) < math.inf)
    return a * torch.where(is_hidden, 0.0, found)


def _hypot(a: Any, b: Any) -> Any:
    """By the quotient of both, whose square is neither too large nor too small."""
    a, b = abs(a), abs(b)
    most, is_far = torch.maximum(a, b), (a == math.inf) | (b == math.inf)
    quotient = torch.minimum(a, b) / torch.where((most == 0) | is_far, 1.0, most)
    return torch.where(is_far, math.inf, most * torch.sqrt(1 + torch.where(is_far, 0.0, quotient * quotient)))


def _isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> Any:
    apart = abs(a * 1.0 - b * 1.0)  # infinite are close to nothing else
    return (a == b) | ((apart < math.inf) & (apart <= atol + rtol * abs(b)))


def _nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    most = torch.finfo(torch.float32).max
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    x = torch.where(x == -math.inf, -most if neginf is None else neginf, x)
    return torch.where(x != x, nan, x)


FORMULAS: dict[str, Callable[..., Any]] = {
    "softplus": _softplus, "gelu": _gelu, "elu": _elu, "hardtanh": _hardtanh, "logaddexp": _logaddexp,
    "atan2": _atan2, "isclose": _isclose, "nan_to_num": _nan_to_num,
    "logsigmoid": lambda x: -_softplus(-x, 1, math.inf),
    "log_sigmoid": lambda x: -_softplus(-x, 1, math.inf),
    "leaky_relu": lambda x, negative_slope=0.01: torch.where(x > 0, x, x * negative_slope),
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha),
    "selu": lambda x: _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946),
    "relu6": lambda x: _hardtanh(x, 0.0, 6.0), "hardsigmoid": lambda x: _hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    "hardswish": lambda x: x * _hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    "mish": lambda x: x * torch.tanh(_softplus(x)), "softsign": lambda x: x / (1 + abs(x)),
    "tanhshrink": lambda x: x - torch.tanh(x),
    "softshrink": lambda x, lambd=0.5: torch.where(
        x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0)
    ),
    "hardshrink": lambda x, lambd=0.5: torch.where((x >= -lambd) & (x <= lambd), 0.0, x),
    "threshold": lambda x, threshold, value: torch.where(x <= threshold, value, x),
    "logit": _logit, "xlogy": _xlogy, "sinc": _sinc, "log_ndtr": _log_ndtr,
    "xlog1py": lambda a, b: _xlogy(a, b, torch.log1p),
    "entr": lambda x: torch.where(x < 0, -math.inf, -_xlogy(x, torch.where(x < 0, 1.0, x))),
    "ndtr": lambda x: 0.5 * torch.erfc(x * -math.sqrt(0.5)),
    "logaddexp2": lambda a, b: _logaddexp(a * math.log(2), b * math.log(2)) * (1 / math.log(2)),
    "float_power": lambda x, exponent: (x * 1.0) ** exponent,
    "prelu": lambda x, weight: torch.where(x > 0, x, weight * x), "frac": lambda x: x - torch.trunc(x),
    "deg2rad": lambda x: x * (math.pi / 180), "rad2deg": lambda x: x * (180 / math.pi),
    "hypot": _hypot, "signbit": lambda x: x < 0,
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "addcmul": lambda x, a, b, *, value=1: x + value * (a * b),
    "addcdiv": lambda x, a, b, *, value=1: x + value * (a / b),
    "copysign": lambda a, b: torch.where(b < 0, -abs(a), abs(a)),
    "heaviside": lambda x, values: torch.where(x == 0, values, (x > 0).to(x.dtype)),
    "fmax": lambda a, b: torch.where((b != b) | (a >= b), a, b),
    "fmin": lambda a, b: torch.where((b != b) | (a <= b), a, b),
    "isinf": lambda x: abs(x) == math.inf, "isfinite": lambda x: abs(x) < math.inf,
    "isposinf": lambda x: x == math.inf, "isneginf": lambda x: x == -math.inf,
}  # fmt: skip
