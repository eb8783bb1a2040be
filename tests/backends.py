"""Plans made and run by hand: for tests that ask one backend, of problems that a call cannot have."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, Options
from tilewise.core.signature import Request, Signature, look
from tilewise.dispatch import choice, plans
from tilewise.dispatch.capability import refusal


class Backend:
    """One backend by name, without the cache of plans."""

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, problem: AttentionProblem, is_backward: bool = False) -> str | None:
        """The reason why not, or None."""
        return refusal(self.name, problem, is_backward)

    def forward(self, problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.results(problem, inputs)[:2]

    def results(self, problem: AttentionProblem, inputs: Inputs) -> Results:
        return plans.run(self._entry(problem, self.signature("forward", problem, inputs)), inputs)

    def backward(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        out: Tensor | None,
        lse: Tensor | None,
        dout: Tensor,
        dlse: Tensor | None,
        residual: Tensor | None = None,
    ) -> Gradients:
        results = Results(out, lse, residual)
        given = (*results, dout, dlse)
        signature = self.signature("backward", problem, inputs, given)
        return plans.run(self._entry(problem, signature), inputs, results, dout, dlse)

    def _entry(self, problem: AttentionProblem, signature: Signature) -> plans.Entry:
        module = choice.load(self.name)
        return plans.Entry(module.plan(problem, signature), signature, self.name, module.saves(problem))

    def signature(
        self, direction: str, problem: AttentionProblem, inputs: Inputs, results: tuple = ()
    ) -> Signature:
        """Of a call, or with out, lse, its residual, dout and dlse of its backward."""
        return Signature(
            direction,
            look(inputs, torch.is_grad_enabled()),
            look(results, False),
            inputs.key.data_ptr() == inputs.value.data_ptr(),
            Options(),
            self.name,
            Request(residual=True),
            problem.bias_needs_grad,
            torch.get_num_threads(),
        )
