// Part 1: the forward pass, tile by tile.

import { byId, command, count, difference, el, matrix, number, ownCommand, say, stepper, table } from "./elements.js";
import { cut, forward, isVisible, largestDifference } from "./arithmetic.js";

export function tilesPart() {
  let pass = null, given = null;
  const restart = stepper(byId("tiles-stepper"), "Tiles", (position) => draw(position));

  function draw(position) {
    const isEnd = position > pass.steps.length;
    const step = position >= 1 && !isEnd ? pass.steps[position - 1] : null;
    const said = say("tiles-says", step ? sentence(step, position) : isEnd ? ending() : beginning());
    byId("tiles-scores").replaceChildren(scoreTable(position, step));
    byId("tiles-operands").replaceChildren(...operandTables(step));
    byId("tiles-state").replaceChildren(stateTable(step, isEnd, position));
    const moved = position === 0 ? pass.start : isEnd ? pass.moved : step.moved;
    byId("tiles-moved").textContent =
      `Moved so far between slow and fast memory: ${count(moved.read)} numbers read, ${count(moved.written)} written. ` +
      `Standard attention would read and write S and P: ${count(4 * pass.shape.seqlenQ * pass.shape.seqlenK)} on top of Q, K, V and O.`;
    return said;
  }

  const place = ([start, end]) => (end - start === 1 ? `${start}` : `${start}–${end - 1}`);

  function beginning() {
    const skipped = pass.tiles.filter((tile) => tile.isEmpty).length;
    const masked = skipped ? ` ${skipped} of them hold only the future and are never loaded.` : "";
    return `Before the first tile: m = −∞, ℓ = 0, acc = 0 for every query. ${pass.tiles.length} tiles to visit.${masked}`;
  }

  function sentence(step, position) {
    const raised = step.m.filter((m, r) => m > step.mOld[r] && step.mOld[r] !== -Infinity).length;
    const first = step.mOld.every((m) => m === -Infinity);
    const what = first
      ? "The first tile of these queries: c = 0 discards the empty start."
      : raised
        ? `The maximum of ${raised} ${raised === 1 ? "query" : "queries"} rose: c < 1 shrinks what was summed before.`
        : "No maximum rose: c = 1, nothing is corrected.";
    return `Step ${position}: queries <b>${place(step.tile.rows)}</b> against keys <b>${place(step.tile.cols)}</b>. ${what}`;
  }

  function ending() {
    const divided = given.settings.order === "fa2" ? "each query tile was divided when its last key tile was done" : "O is divided by ℓ once all tiles are done";
    return `The end: out = acc / ℓ and lse = m + log ℓ; ${divided}. This is softmax(scale · Q Kᵀ) V, exactly.`;
  }

  function scoreTable(position, step) {
    const { shape } = pass;
    const values = Array.from({ length: shape.seqlenQ }, () => new Array(shape.seqlenK).fill("·"));
    const looks = values.map((row) => row.map(() => "todo"));
    const paint = (tile, look, s) => {
      for (let i = tile.rows[0]; i < tile.rows[1]; i++)
        for (let j = tile.cols[0]; j < tile.cols[1]; j++) {
          looks[i][j] = isVisible(i, j, shape) ? look : `${look} masked`;
          values[i][j] = s ? number(s[i - tile.rows[0]][j - tile.cols[0]], 3) : "";
        }
    };
    pass.tiles.filter((tile) => tile.isEmpty).forEach((tile) => paint(tile, "skipped", null));
    pass.steps.slice(0, Math.max(0, position)).forEach((done) => paint(done.tile, "done", done.s));
    if (step) paint(step.tile, "now", step.s);
    return matrix("S = scale · Q Kᵀ (a tile is forgotten after its step)", values, {
      look: (r, c) => looks[r][c], rowHead: (r) => `q${r}`, colHead: (c) => `k${c}`,
    });
  }

  function operandTables(step) {
    const part = (rows, [start, end], letter) =>
      matrix(`${letter.toUpperCase()} ${place([start, end])}`, rows.slice(start, end), {
        look: () => letter, rowHead: (r) => `${letter}${start + r}`,
      });
    if (!step) return ["query", "key", "value"].map((name) => part(given.inputs[name], [0, given.inputs[name].length], name[0]));
    const p = matrix("p = exp(s − m)", step.p, {
      look: () => "now", rowHead: (r) => `q${step.tile.rows[0] + r}`, colHead: (c) => `k${step.tile.cols[0] + c}`,
    });
    const { query, key, value } = given.inputs;
    return [part(query, step.tile.rows, "q"), part(key, step.tile.cols, "k"), part(value, step.tile.cols, "v"), p];
  }

  function stateTable(step, isEnd, position) {
    const spans = cut(pass.shape.seqlenQ, given.settings.blockQ);
    const places = spans.flatMap(([start, end], tile) => Array.from({ length: end - start }, (_, r) => [start + r, tile, r]));
    const header = ["query", "m", "c", "ℓ", "acc", isEnd ? "out = acc / ℓ" : "acc / ℓ, were this the end"];
    if (isEnd) header.push("lse");
    const rows = places.map((place) => stateRow(...place, step, isEnd, position));
    return table("What each query keeps", header, rows, (n) => (step !== null && step.tile.i === places[n][1] ? "now" : ""));
  }

  function stateRow(query, tile, r, step, isEnd, position) {
    const shown = isEnd ? pass.states[tile] : position === 0 ? null : step.states[tile];
    const m = shown ? shown.m[r] : -Infinity, l = shown ? shown.l[r] : 0;
    const acc = shown ? shown.acc[r] : given.inputs.value[0].map(() => 0);
    const isNow = step !== null && step.tile.i === tile;
    const changed = (before, after) =>
      isNow && before !== after ? [el("span", { class: "was" }, `${number(before)} → `), number(after)] : [number(after)];
    const vector = (xs) => xs.map((x) => number(x, 3)).join("  ");
    const out = acc.map((x) => x / (l === 0 ? 1 : l));
    const cells = [
      `q${query}`,
      changed(isNow ? step.mOld[r] : m, m),
      isNow ? number(step.correction[r]) : "",
      changed(isNow ? step.lOld[r] : l, l),
      vector(acc),
      vector(out),
    ];
    if (isEnd) cells.push(number(m + Math.log(l)));
    return cells;
  }

  return (next) => {
    given = next;
    pass = forward(next.inputs, next.settings);
    restart(pass.steps.length + 1);
    showCheck(next, pass);
    command(byId("tiles-command"), traceCommand({ ...next, dout: null }));
  };
}

// Beside Python's own trace, where the page has one of the same inputs and settings.
function showCheck({ example, settings }, pass) {
  const key = `${settings.order} ${settings.causal}`;
  const isSame = example && settings.blockQ === example.block_q && settings.blockK === example.block_k && settings.scale === example.scale;
  const line = byId("tiles-check");
  if (!isSame) return (line.textContent = "Computed in this page alone: Python's trace of these inputs is a command away.");
  const expected = example.traces[key];
  const worst = Math.max(
    largestDifference(pass.out, expected.out),
    largestDifference([pass.lse], [expected.lse.map((x) => (x === null ? -Infinity : x))]),
  );
  line.replaceChildren(
    "Computed live in this page. Largest difference from Python's trace: ",
    difference(worst, 1e-6), ".",
  );
}

// The example's name where it is one; else a line of Python that holds the numbers.
export function traceCommand({ example, settings, inputs, dout }) {
  if (!example) return ownCommand(inputs, settings, dout);
  const parts = [example.command, `--order ${settings.order}`];
  if (dout) parts.push("--backward");
  if (settings.causal) parts.push("--causal");
  if (settings.blockQ !== example.block_q) parts.push(`--block-q ${settings.blockQ}`);
  if (settings.blockK !== example.block_k) parts.push(`--block-k ${settings.blockK}`);
  if (settings.scale !== example.scale) parts.push(`--scale ${settings.scale}`);
  return parts.join(" ");
}
