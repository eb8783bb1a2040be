// Part 2: online softmax on a number line, and float32 with and without the maximum.

import { attempt, byId, command, el, figure, number, options, ownCommand, say, stepper, svg, table } from "./elements.js";
import { forward, parseMatrix, softmax32, sum } from "./arithmetic.js";

const HEIGHT = 222, LEFT = 40, BASE = 150, TALL = 95;

export function onlinePart(examples) {
  let scores = [], states = [], position = 0;
  const byName = Object.fromEntries(examples.map((example) => [example.name, example]));
  options(byId("online-example"), [...Object.keys(byName), ["own", "my own"]], examples[0].name);
  const drawLine = figure(byId("online-line"), (width) => picture(states[position], width));
  const restart = stepper(byId("online-stepper"), "Scores", draw);

  function draw(next) {
    position = next;
    const state = states[position];
    const old = position > 0 ? states[position - 1] : null;
    drawLine();
    return say("online-says", old ? sentence(old, state) : "Nothing seen: m = −∞ and ℓ = 0.");
  }

  const sentence = (old, state) =>
    `Tile of ${state.tile.map((x) => number(x)).join(", ")}: m = max(${number(old.m)}, ${number(Math.max(...state.tile))}) = <b>${number(state.m)}</b>, ` +
    `c = exp(${number(old.m)} − ${number(state.m)}) = <b>${number(state.c)}</b>, ` +
    `ℓ = ${number(state.c)} · ${number(old.l)} + ${number(state.sum)} = <b>${number(state.l)}</b>.`;

  function picture(state, width) {
    const low = Math.min(...scores), high = Math.max(...scores), room = Math.max(1, high - low) * 0.08;
    const x = (value) => LEFT + ((value - low + room) / (high - low + 2 * room)) * (width - 2 * LEFT);
    const isSeen = (n) => n < state.seen;
    const bars = scores.map((value, n) => {
      const weight = isSeen(n) ? Math.exp(value - state.m) : 0;
      const height = Math.max(weight * TALL, isSeen(n) ? 1 : 0);
      return svg(
        "g", { opacity: isSeen(n) ? 1 : 0.55 },
        svg("rect", { x: x(value) - 9 + spread(n), y: BASE - height, width: 18, height, rx: 3, fill: "var(--k)" }),
        isSeen(n) ? svg("text", { x: x(value) + spread(n), y: BASE - Math.max(height, 5) - 7, "text-anchor": "middle" }, number(weight, 3)) : null,
        svg("circle", { cx: x(value) + spread(n), cy: BASE, r: 5, fill: isSeen(n) ? "var(--k)" : "var(--card)", stroke: "var(--k)", "stroke-width": 2 }),
        svg("text", { x: x(value) + spread(n), y: BASE + 22 + 15 * equalsBefore(n), "text-anchor": "middle" }, number(value, 2)),
      );
    });
    const marker = state.m === -Infinity ? null : svg(
      "g", {},
      svg("line", { x1: x(state.m), x2: x(state.m), y1: 18, y2: BASE - TALL - 20, stroke: "var(--accent)", "stroke-width": 2, "stroke-dasharray": "5 4" }),
      svg("text", { x: x(state.m), y: 13, "text-anchor": "middle" }, `m = ${number(state.m)}`),
    );
    const label = `Number line with ${scores.length} scores, ${state.seen} of them seen; m is ${number(state.m)}, the sum is ${number(state.l)}.`;
    return svg(
      "svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label },
      svg("line", { x1: LEFT / 2, x2: width - LEFT / 2, y1: BASE, y2: BASE, class: "axis" }),
      marker, bars, svg("text", { x: width - LEFT / 2, y: HEIGHT - 6, "text-anchor": "end" }, `ℓ, the sum of the bars = ${number(state.l)}`),
    );
  }

  // Equal scores stand side by side.
  const equalsBefore = (n) => scores.slice(0, n).filter((value) => value === scores[n]).length;
  const spread = (n) => equalsBefore(n) * 22;

  const stateOf = ({ tile, s, p, m, l, correction }) => ({ seen: tile.cols[1], m: m[0], c: correction[0], sum: sum(p[0]), l: l[0], tile: s[0] });

  function float32() {
    const subtract = document.querySelector("input[name=shift]:checked").value === "with";
    const { e, total, out } = softmax32(scores, subtract);
    const precise = (x) => number(x, 6);
    byId("online-float32").replaceChildren(table(
      subtract ? "With the maximum subtracted" : "Without the maximum subtracted",
      ["", ...scores.map((x) => precise(x))],
      [[subtract ? "exp(x − max)" : "exp(x)", ...e.map(precise)], ["divided by the sum", ...out.map(precise)]],
    ));
    const isBroken = out.some(Number.isNaN);
    const why = total === Infinity ? "exp passed 3.4e38 and became ∞; ∞ / ∞ is not a number" : total === 0 ? "every exp fell below the smallest number and became 0; 0 / 0 is not a number" : "";
    byId("online-verdict").replaceChildren(
      `The sum is ${precise(total)}: `,
      isBroken ? el("span", { class: "bad" }, `${why}.`) : el("span", { class: "good" }, subtract ? "the largest exponential is exactly 1, so the sum is at least 1 and at most the number of scores." : "these scores are harmless."),
    );
  }

  function update() {
    let own, settings;
    const read = () => {
      const parsed = parseMatrix(byId("online-scores").value, { maxCols: 16 });
      const block = Number(byId("online-block").value);
      if (parsed.length !== 1) throw new Error("must be one row");
      if (!Number.isInteger(block) || block < 1) throw new Error("need tiles of at least one key");
      scores = parsed[0];
      own = { query: [[1]], key: scores.map((x) => [x]), value: scores.map((_, n) => scores.map((_, m) => Number(m === n))) };
      settings = { blockQ: 1, blockK: block, order: "fa2", scale: 1, causal: false };
      states = [{ seen: 0, m: -Infinity, l: 0, tile: [] }, ...forward(own, settings).steps.map(stateOf)];
    };
    if (!attempt("online-error", read, (message) => `The scores: ${message}.`)) return;
    restart(states.length - 1);
    float32();
    const example = byName[byId("online-example").value];
    command(byId("online-command"), example ? exampleCommand(example, settings) : ownCommand(own, settings));
  }

  const exampleCommand = (example, { blockK }) =>
    `${example.command}${blockK === example.block_k ? "" : ` --block-k ${blockK}`}`;

  const choose = (name) => {
    const example = byName[name];
    if (!example) return;
    byId("online-scores").value = example.key.map((row) => row[0]).join(" ");
    byId("online-block").value = example.block_k;
  };
  byId("online-example").addEventListener("input", (event) => (choose(event.target.value), update()));
  byId("online-scores").addEventListener("input", () => ((byId("online-example").value = "own"), update()));
  byId("online-block").addEventListener("input", update);
  document.querySelectorAll("input[name=shift]").forEach((radio) => radio.addEventListener("input", float32));
  choose(examples[0].name);
  update();
}
