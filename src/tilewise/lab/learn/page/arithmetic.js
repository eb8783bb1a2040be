// Tiled attention by the steps of `tilewise trace`, in float64. Matrices are arrays of rows.

const NEG_INF = -Infinity;

const finite = (x) => (x === NEG_INF ? 0 : x);
export const dot = (a, b) => a.reduce((sum, x, n) => sum + x * b[n], 0);
const zeros = (rows, cols) => Array.from({ length: rows }, () => new Array(cols).fill(0));
export const sum = (xs) => xs.reduce((a, b) => a + b, 0);

export function cut(length, block) {
  const spans = [];
  for (let start = 0; start < length; start += block) spans.push([start, Math.min(start + block, length)]);
  return spans;
}

// The last query is aligned with the last key.
export const isVisible = (i, j, shape) => !shape.causal || j <= i + shape.seqlenK - shape.seqlenQ;

function shapeOf(inputs, settings) {
  return { seqlenQ: inputs.query.length, seqlenK: inputs.key.length, causal: settings.causal };
}

// Tiles in the order of the walk: FA1 has keys outside, FA2 queries.
function tilesOf(shape, settings) {
  const queries = cut(shape.seqlenQ, settings.blockQ).map((rows, i) => ({ i, rows }));
  const keys = cut(shape.seqlenK, settings.blockK).map((cols, j) => ({ j, cols }));
  const pairs =
    settings.order === "fa1"
      ? keys.flatMap((k) => queries.map((q) => ({ ...q, ...k })))
      : queries.flatMap((q) => keys.map((k) => ({ ...q, ...k })));
  return pairs.map((tile) => ({ ...tile, isEmpty: !anyVisible(tile, shape) }));
}

function anyVisible({ rows, cols }, shape) {
  return isVisible(rows[1] - 1, cols[0], shape);
}

// s = scale q k^T, -inf where not visible.
function scores(inputs, tile, shape, scale) {
  const s = [];
  for (let i = tile.rows[0]; i < tile.rows[1]; i++) {
    const row = [];
    const q = inputs.query[i].map((x) => x * scale);
    for (let j = tile.cols[0]; j < tile.cols[1]; j++) {
      row.push(isVisible(i, j, shape) ? dot(q, inputs.key[j]) : NEG_INF);
    }
    s.push(row);
  }
  return s;
}

// One tile of online softmax: the state (m, l, acc) of its queries goes in and comes out.
function onlineSoftmaxStep(s, value, cols, state) {
  const mTile = s.map((row) => Math.max(...row));
  const m = mTile.map((x, r) => Math.max(state.m[r], x));
  const correction = m.map((x, r) => Math.exp(state.m[r] - finite(x)));
  const p = s.map((row, r) => row.map((x) => Math.exp(x - finite(m[r]))));
  const l = p.map((row, r) => correction[r] * state.l[r] + sum(row));
  const acc = state.acc.map((row, r) =>
    row.map((x, c) => correction[r] * x + sum(p[r].map((w, n) => w * value[cols[0] + n][c]))),
  );
  return { mTile, m, correction, p, l, acc };
}

const divide = (rows, l) => rows.map((row, r) => row.map((x) => x / (l[r] === 0 ? 1 : l[r])));

// Every step of a forward pass, and the result. settings: blockQ, blockK, order, normalize, scale, causal.
export function forward(inputs, settings) {
  const shape = shapeOf(inputs, settings);
  const dimV = inputs.value[0].length;
  const tiles = tilesOf(shape, settings);
  const states = cut(shape.seqlenQ, settings.blockQ).map(([start, end]) => ({
    m: new Array(end - start).fill(NEG_INF),
    l: new Array(end - start).fill(0),
    acc: zeros(end - start, dimV),
    correction: new Array(end - start).fill(null),
  }));
  const traffic = trafficCounter(inputs, settings, shape);
  const steps = [];
  for (const tile of tiles.filter((t) => !t.isEmpty)) {
    const old = states[tile.i];
    const s = scores(inputs, tile, shape, settings.scale);
    const step = onlineSoftmaxStep(s, inputs.value, tile.cols, old);
    states[tile.i] = { m: step.m, l: step.l, acc: step.acc, correction: step.correction };
    const out = divide(step.acc, step.l);
    steps.push({
      tile, s, ...step, mOld: old.m, lOld: old.l, accOld: old.acc, out,
      moved: traffic.visit(tile), states: [...states],
    });
  }
  const out = states.flatMap((state) => divide(state.acc, state.l));
  const lse = states.flatMap((state) => state.m.map((m, r) => m + Math.log(state.l[r])));
  return { steps, tiles, states, out, lse, moved: traffic.finish(), start: traffic.start, shape };
}

// Elements between slow and fast memory: the inner loop's tile at every visit, the outer loop's when it is new.
function trafficCounter(inputs, settings, shape) {
  const d = inputs.query[0].length, dv = inputs.value[0].length, n = shape.seqlenQ;
  const isFa1 = settings.order === "fa1";
  const start = { read: 0, written: isFa1 ? n * dv + 2 * n : 0 };
  const total = { ...start };
  let resident = null;
  const visit = (tile) => {
    const rows = tile.rows[1] - tile.rows[0], cols = tile.cols[1] - tile.cols[0];
    const outer = isFa1 ? tile.j : tile.i;
    const query = rows * d, keys = cols * (d + dv), state = isFa1 ? rows * (dv + 2) : 0;
    const inner = isFa1 ? query : keys, fresh = isFa1 ? keys : query;
    total.read += inner + state + (outer === resident ? 0 : fresh);
    total.written += state;
    resident = outer;
    return { ...total };
  };
  const finish = () => {
    if (!isFa1) total.written += n * dv + n;
    else if (settings.normalize === "end") {
      total.read += n * dv + n;
      total.written += n * dv;
    }
    return { ...total };
  };
  return { start, visit, finish };
}

// The backward pass by recomputation: queries outside, keys inside, P again from lse.
export function backward(inputs, dout, settings) {
  const pass = forward(inputs, { ...settings, order: "fa2" });
  const { shape } = pass, d = inputs.query[0].length;
  const delta = pass.out.map((row, i) => dot(row, dout[i]));
  const dq = zeros(shape.seqlenQ, d), dk = zeros(shape.seqlenK, d);
  const dv = zeros(shape.seqlenK, inputs.value[0].length);
  const steps = [];
  for (const { tile } of pass.steps) {
    const s = scores(inputs, tile, shape, settings.scale);
    const p = s.map((row, r) => row.map((x) => Math.exp(x - finite(pass.lse[tile.rows[0] + r]))));
    const dp = s.map((row, r) => row.map((_, c) => dot(dout[tile.rows[0] + r], inputs.value[tile.cols[0] + c])));
    const ds = p.map((row, r) => row.map((x, c) => x * (dp[r][c] - delta[tile.rows[0] + r])));
    accumulate(inputs, dout, tile, { p, ds, dq, dk, dv }, settings.scale);
    const copy = (matrix) => matrix.map((row) => [...row]);
    steps.push({ tile, s, p, dp, ds, dq: copy(dq), dk: copy(dk), dv: copy(dv) });
  }
  return { steps, delta, dq, dk, dv, forward: pass };
}

function accumulate(inputs, dout, tile, { p, ds, dq, dk, dv }, scale) {
  ds.forEach((row, r) => {
    const i = tile.rows[0] + r;
    row.forEach((x, c) => {
      const j = tile.cols[0] + c;
      inputs.key[j].forEach((k, n) => (dq[i][n] += scale * x * k));
      inputs.query[i].forEach((q, n) => (dk[j][n] += scale * x * q));
      dout[i].forEach((g, n) => (dv[j][n] += p[r][c] * g));
    });
  });
}

// softmax in float32, with the maximum subtracted or not: every intermediate is rounded.
export function softmax32(logits, subtractMax) {
  const round = Math.fround;
  const x = logits.map(round);
  const shift = subtractMax ? Math.max(...x) : 0;
  const e = x.map((value) => round(Math.exp(round(value - shift))));
  const total = e.reduce((a, b) => round(a + b), 0);
  return { e, total, out: e.map((value) => round(value / total)) };
}

// Numbers that a person typed: rows on lines, numbers apart by blanks or commas.
export function parseMatrix(text, { maxRows = 16, maxCols = 8 } = {}) {
  const lines = text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
  const rows = lines.map((line) => line.split(/[\s,;]+/).filter((cell) => cell !== "").map(Number));
  if (rows.length === 0) throw new Error("has no numbers");
  if (rows.flat().some((x) => !Number.isFinite(x))) throw new Error("holds something that is not a number");
  if (rows.some((row) => row.length !== rows[0].length)) throw new Error("has rows of different lengths");
  if (rows.length > maxRows) throw new Error(`has ${rows.length} rows; at most ${maxRows} can be shown`);
  if (rows[0].length > maxCols) throw new Error(`has ${rows[0].length} columns; at most ${maxCols} can be shown`);
  return rows;
}

export function checkInputs({ query, key, value }) {
  if (query[0].length !== key[0].length) {
    throw new Error(`Q has ${query[0].length} columns and K has ${key[0].length}; they must have as many`);
  }
  if (key.length !== value.length) {
    throw new Error(`K has ${key.length} rows and V has ${value.length}; they must have as many`);
  }
}

export function largestDifference(a, b) {
  const x = a.flat(), y = b.flat();
  return x.reduce((worst, value, n) => Math.max(worst, value === y[n] ? 0 : Math.abs(value - y[n])), 0);
}
