// Part 7: attention in 8 bits, as it is and rotated.

import { attempt, byId, command, difference, el, figure, matrix, number, options, ownFp8Command, small, svg, table } from "./elements.js";
import { largestDifference } from "./arithmetic.js";
import { bitsOf, rms, roundE4m3, roundWeight, spacing, walk } from "./fp8.js";
import { typedInputs } from "./walk_inputs.js";

const SHOWN = 8; // columns of a query in the tables
const MOST = 1e6; // of what is typed: sums of products stay far from float32's end
const CHART = 190, LEFT = 34, ROOM = 22, CELL = 18;
const WAYS = { plain: "q", rotated: "q H" };
const FIELDS = { query: "eight-q", key: "eight-k", value: "eight-v" };
const OWN = {
  query: "0.8 12 -0.3 1.1\n-1.2 -9.5 0.7 0.2\n0.4 15 1.6 -0.9", key: "1.3 10 0.5 -0.4\n-0.6 14 -1.1 0.9\n0.2 -11 0.3 1.7\n0.9 8 -0.8 -1.5",
  value: "1 0.3\n-0.7 2\n0.1 -1.4\n0.6 0.9",
};

const power = (n) => `2${String(n).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)])}`;
const percent = (x) => `${Number((100 * x).toPrecision(3))}%`;

export function eightPart({ fp8 }) {
  let shown = null, query = 0;
  const drawers = Object.keys(WAYS).flatMap((name) => [
    figure(byId(`eight-${name}-columns`), (width) => columns(name, width)),
    figure(byId(`eight-${name}-errors`), (width) => errorMap(name, width)),
  ]);

  // Largest of each column in units of the block's factor: q upwards, k downwards.
  function columns(name, width) {
    const way = shown[name], middle = CHART / 2, tall = middle - 16, dim = way.q[0].length, step = (width - LEFT) / dim;
    const largest = (rows, factor) => rows[0].map((_, c) => Math.max(...rows.map((row) => Math.abs(row[c]))) / factor);
    const tops = { q: largest(way.q, way.q8.factor), k: largest(way.k, way.k8.factor) };
    const label = Object.entries(tops).map(([letter, xs]) => `${letter}: largest column ${number(Math.max(...xs), 0)}, median ${number([...xs].sort((a, b) => a - b)[dim >> 1], 0)}`);
    const line = (y, text) => [
      svg("line", { x1: LEFT, x2: width, y1: y, y2: y, class: text === "0" ? "axis" : "grid" }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", class: "quiet" }, text),
    ];
    const bars = (letter, sign) => tops[letter].map((x, c) => {
      const height = (x / 448) * tall;
      return svg("rect", { x: LEFT + c * step, y: sign > 0 ? middle - height : middle, width: Math.max(1, step - 1), height, fill: `var(--${letter})` });
    });
    return svg(
      "svg", { viewBox: `0 0 ${width} ${CHART}`, role: "img", "aria-label": `Columns over the factor. ${label.join("; ")}.` },
      line(middle - tall, "448"), line(middle, "0"), line(middle + tall, "448"), bars("q", 1), bars("k", -1),
      svg("text", { x: LEFT, y: 11 }, `largest of each of ${dim} columns of q`), svg("text", { x: LEFT, y: CHART - 2 }, "and of k"),
    );
  }

  // Both maps have the same scale.
  function errorMap(name, width) {
    const { errors } = shown[name], worst = Math.max(...[shown.plain, shown.rotated].flatMap((way) => way.errors.flat().map(Math.abs)));
    const step = (width - LEFT) / errors[0].length, height = ROOM + errors.length * CELL + 4;
    const cell = (x, i, j) => svg(
      "rect", { x: LEFT + j * step, y: ROOM + i * CELL, width: step - 1, height: CELL - 1, fill: x < 0 ? "var(--k)" : "var(--q)", "fill-opacity": worst === 0 ? 0 : Math.abs(x) / worst },
      svg("title", {}, `q${i} k${j}: ${number(shown[name].scores[i][j])}, exact ${number(shown.scores[i][j])}`),
    );
    const label = `Errors of ${errors.length} × ${errors[0].length} scores: root mean square ${number(rms(errors))}, largest ${number(Math.max(...errors.flat().map(Math.abs)))}.`;
    return svg(
      "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      svg("text", { x: LEFT, y: 14 }, `errors of the scores, root mean square ${number(rms(errors))}`),
      errors.map((row, i) => row.map((x, j) => cell(x, i, j))),
      svg("text", { x: LEFT - 6, y: ROOM + query * CELL + 13, "text-anchor": "end" }, `q${query}`),
      svg("rect", { x: LEFT - 1, y: ROOM + query * CELL - 1, width: width - LEFT, height: CELL + 1, fill: "none", stroke: "var(--accent)", "stroke-width": 2 }),
    );
  }

  function numbers(name) {
    const { q, q8 } = shown[name], letters = WAYS[name];
    const scaled = q[query].slice(0, SHOWN).map((x) => x / q8.factor), rounded = q8.values[query].slice(0, SHOWN);
    const off = scaled.map((x, c) => (x === 0 ? "" : number((100 * (rounded[c] - x)) / x, 1)));
    const heads = [`${letters} / f`, "e4m3", "% off"];
    return matrix(
      `${letters} of query ${query}, ${scaled.length} of ${q[0].length} columns; factor f = ${power(Math.log2(q8.factor))}`, [scaled, rounded, off],
      { digits: 2, rowHead: (r) => heads[r], colHead: (c) => `${c}`, look: (r) => (r === 1 ? "now" : "") },
    );
  }

  function weights() {
    const p = shown.rotated.weights[query], plain = p.map((x) => roundE4m3(Math.fround(x))), times = p.map(roundWeight);
    const heads = ["p = exp(s − m)", "e4m3 of p", "e4m3 of 256 p, over 256"];
    byId("eight-weights").replaceChildren(
      matrix(`Weights of query ${query}, from rotated scores`, [p, plain, times], { digits: 5, rowHead: (r) => heads[r], colHead: (c) => `k${c}`, look: (r) => (r === 2 ? "now" : "") }),
    );
    const zeros = (rounded) => shown.rotated.weights.flat().map(rounded).filter((x) => x === 0).length;
    byId("eight-zeros").innerHTML =
      `Of all ${p.length * shown.scores.length} weights <b>${zeros((x) => roundE4m3(Math.fround(x)))}</b> would round to 0 as they are, <b>${zeros(roundWeight)}</b> do times 256. ` +
      `The smallest e4m3 number is ${power(-9)}; the largest weight is 1, far from 448, so ${power(8)} costs nothing.`;
  }

  const gain = (plain, rotated) =>
    plain === rotated ? "the same" : plain > rotated ? `${number(plain / rotated, 2)} times less` : `${number(rotated / plain, 2)} times more`;

  function facts() {
    const { plain, rotated, scores, out } = shown;
    byId("eight-exact").innerHTML =
      `Before rounding the rotation changes no score: (q H)(k H)ᵀ / ${rotated.q[0].length} is q kᵀ, with a largest difference of <b>${small(largestDifference(rotated.unrounded, scores))}</b>. ` +
      `After rounding one column has <b>${percent(Math.max(...plain.shares))}</b> of the scores' squared error as they are, and at most <b>${percent(Math.max(...rotated.shares))}</b> rotated.`;
    const row = (name, exact, a, b) => [name, number(rms(exact)), number(rms(a)), number(rms(b)), el("b", {}, gain(rms(a), rms(b)))];
    const rows = [row("scores", scores, plain.errors, rotated.errors), row("output", out, plain.outErrors, rotated.outErrors)];
    byId("eight-gain").replaceChildren(table("Root mean squares of these numbers", ["", "exact", "error as they are", "error rotated", "the rotation errs"], rows));
  }

  function check(isOwn, size) {
    const line = byId("eight-check");
    command(byId("eight-command"), isOwn ? ownFp8Command(inputs(), query) : `tilewise fp8 --outlier ${size} --query ${query}`);
    if (isOwn) return (line.textContent = "Computed in this page alone: Python's numbers for these inputs are a command away.");
    const expected = fp8.errors[size];
    const found = { "plain scores": shown.plain.errors, "rotated scores": shown.rotated.errors, "plain out": shown.plain.outErrors, "rotated out": shown.rotated.outErrors };
    const worst = Math.max(...Object.entries(found).map(([name, errors]) => Math.abs(rms(errors) - expected[name])));
    line.replaceChildren(
      "Computed live in this page. Largest difference from the root mean squares of ", el("code", {}, "tilewise.fp8"), ": ",
      difference(worst, 1e-9), ".",
    );
  }

  const isOwn = () => byId("eight-inputs").value === "own";

  function inputs() {
    if (!isOwn()) {
      const times = (rows) => rows.map(([first, ...others]) => [first * byId("eight-size").value, ...others]);
      return { query: times(fp8.query), key: times(fp8.key), value: fp8.value };
    }
    const parsed = typedInputs(FIELDS, { maxCols: fp8.signs.length });
    if (Object.values(parsed).flat(2).some((x) => Math.abs(x) > MOST)) throw new Error("Numbers must be at most a million in size.");
    return parsed;
  }

  function update() {
    const slider = byId("eight-size");
    slider.disabled = isOwn();
    byId("eight-size-says").textContent = isOwn() ? "as typed" : `times ${slider.value}`;
    slider.setAttribute("aria-valuetext", `times ${slider.value}`);
    if (!attempt("eight-error", () => (shown = walk(inputs(), fp8.signs)))) return;
    query = Math.min(query, shown.scores.length - 1);
    options(byId("eight-query"), shown.scores.map((_, r) => [String(r), `q${r}`]), String(query));
    draw();
  }

  function draw() {
    drawers.forEach((redraw) => redraw());
    Object.keys(WAYS).forEach((name) => byId(`eight-${name}-numbers`).replaceChildren(numbers(name)));
    weights();
    facts();
    check(isOwn(), byId("eight-size").value);
  }

  for (const [name, id] of Object.entries(FIELDS)) byId(id).value = OWN[name];
  options(byId("eight-inputs"), ["random", ["own", "my own"]], "random");
  Object.assign(byId("eight-size"), { min: fp8.outliers[0], max: fp8.outliers.at(-1), value: 8 });
  byId("eight-query").addEventListener("input", (event) => ((query = Number(event.target.value)), draw()));
  byId("eight-size").addEventListener("input", update);
  byId("eight-inputs").addEventListener("input", () => ((byId("eight-own").open = isOwn()), update()));
  byId("eight-own").addEventListener("input", () => ((byId("eight-inputs").value = "own"), update()));
  byId("eight-number").addEventListener("input", oneNumber);
  oneNumber();
  update();
}

// A number's bits, and what they stand for.
function oneNumber() {
  const text = byId("eight-number").value;
  if (text === "") return;
  const x = Number(text), rounded = roundE4m3(x), bits = bitsOf(rounded);
  const weights = ["±", "8", "4", "2", "1", "½", "¼", "⅛"], letters = ["k", "q", "q", "q", "q", "v", "v", "v"];
  byId("eight-bits").replaceChildren(
    matrix("Sign, exponent, fraction", [[...bits.sign, ...bits.exponent, ...bits.fraction]], { colHead: (c) => weights[c], look: (_, c) => letters[c] }),
  );
  const field = parseInt(bits.exponent, 2), isPast = Math.abs(x) > 464; // 464 still rounds to 448
  const off = x === 0 ? "" : `, ${percent(Math.abs(rounded - x) / Math.abs(x))} off`;
  byId("eight-number-says").innerHTML =
    `${bits.sign === "1" ? "−" : ""}${bits.significand} × ${power(bits.power)} = <b>${rounded === 0 ? "0" : String(rounded).replace("-", "−")}</b>${off}. ` +
    (isPast ? "Nothing is larger than 448: a block's factor keeps its numbers below. " : "") +
    (field === 0
      ? `The exponent field is 0: the power is ${power(-6)} with no 1 before the fraction, and fewer bits count.`
      : `The power is the exponent field less 7: ${field} − 7; the first of the 4 significant bits is always 1 and is not stored.`) +
    ` Numbers here lie ${power(Math.log2(spacing(rounded)))} apart.`;
}
