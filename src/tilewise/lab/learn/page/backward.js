// Part 4: the backward pass by recomputation, and what storing would have cost.

import { byId, bytes, command, count, difference, matrix, say, stepper, table } from "./elements.js";
import { backward, largestDifference } from "./arithmetic.js";
import { traceCommand } from "./tiles.js";

export function backwardPart(data) {
  let pass = null;
  const restart = stepper(byId("backward-stepper"), "Backward", draw);

  function draw(position) {
    if (position === 0) return beginning();
    const step = pass.steps[position - 1], { rows, cols } = step.tile;
    const said = say("backward-says", `Step ${position}: queries ${rows[0]} to ${rows[1] - 1} against keys ${cols[0]} to ${cols[1] - 1}. p comes back from q, k and lse; dp = dO Vᵀ; ds = p · (dp − D).`);
    const heads = { rowHead: (r) => `q${rows[0] + r}`, colHead: (c) => `k${cols[0] + c}`, look: () => "now" };
    byId("backward-tile").replaceChildren(
      matrix("s, again", step.s, heads), matrix("p = exp(s − lse)", step.p, heads),
      matrix("dp = dO Vᵀ", step.dp, heads), matrix("ds = p · (dp − D)", step.ds, heads),
    );
    sums(step, step.tile);
    return said;
  }

  function beginning() {
    byId("backward-tile").replaceChildren(
      matrix("D = rowsum(dO · O)", pass.delta.map((x) => [x]), { look: () => "now", rowHead: (r) => `q${r}` }),
      matrix("lse, kept by the forward", pass.forward.lse.map((x) => [x]), { look: () => "done", rowHead: (r) => `q${r}` }),
    );
    const zero = (rows) => rows.map((row) => row.map(() => 0));
    sums({ dq: zero(pass.dq), dk: zero(pass.dk), dv: zero(pass.dv) }, null);
    return say("backward-says", "Before the tiles: D = rowsum(dO · O), one number per query, takes the place of a row of P · dP.");
  }

  function sums({ dq, dk, dv }, tile) {
    const within = (span, r, letter) => (span && r >= span[0] && r < span[1] ? letter : "done");
    const part = (name, rows, span, letter) =>
      matrix(`${name} so far`, rows, { look: (r) => within(span, r, letter), rowHead: (r) => `${letter}${r}` });
    byId("backward-sums").replaceChildren(
      part("dQ", dq, tile?.rows, "q"), part("dK", dk, tile?.cols, "k"), part("dV", dv, tile?.cols, "v"),
    );
  }

  const { lengths, costs } = data.io, slider = byId("backward-length");
  slider.max = lengths.length - 1;
  slider.value = lengths.indexOf(4096);

  function compare() {
    const n = lengths[slider.value], { backward_storing: stored, backward_recompute: again } = costs["128"][n];
    byId("backward-n").textContent = `N = ${count(n)}`;
    slider.setAttribute("aria-valuetext", `${n}`);
    const row = (name, cost) => [name, bytes(cost.slow_bytes), cost.matmul_flops.toExponential(2), bytes(cost.extra_bytes)];
    byId("backward-cost").replaceChildren(
      table("One head of 128, 16-bit numbers", ["", "moved", "FLOP", "extra memory"], [row("P stored", stored), row("P recomputed", again)]),
    );
    byId("backward-fact").innerHTML =
      `Recomputing takes <b>${(again.matmul_flops / stored.matmul_flops).toFixed(2)} times</b> the products and ` +
      `<b>1/${Math.round(stored.extra_bytes / again.extra_bytes)}</b> of the extra memory.`;
    command(byId("backward-command"), `tilewise io --seqlen ${n} --head-dim 128 --detail`);
  }

  function check({ example, settings, inputs, dout }) {
    const isSame = example && settings.scale === example.scale;
    const line = byId("backward-check");
    command(byId("backward-trace"), traceCommand({ example, settings, inputs, dout }));
    if (!isSame) return (line.textContent = "");
    const { dq, dk, dv } = example.gradients[String(settings.causal)];
    const worst = Math.max(largestDifference(pass.dq, dq), largestDifference(pass.dk, dk), largestDifference(pass.dv, dv));
    line.replaceChildren("Largest difference of dQ, dK and dV from Python's trace: ", difference(worst, 1e-6), ".");
  }

  slider.addEventListener("input", compare);
  compare();
  return (given) => {
    pass = backward(given.inputs, given.dout, given.settings);
    restart(pass.steps.length);
    check(given);
  };
}
