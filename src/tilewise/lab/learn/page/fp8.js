// 8-bit attention by the steps of `tilewise.fp8` and `tilewise.learn.eight_bits`. Rows are at most 128: one block.

const LARGEST = 448, SMALLEST_EXPONENT = -6, WEIGHT_FACTOR = 256;
const view = new DataView(new ArrayBuffer(8));

// floor(log2 |x|), from the bits of x.
function exponentOf(x) {
  view.setFloat64(0, x);
  return ((view.getUint16(0) >> 4) & 2047) - 1023;
}

// The distance of the e4m3 numbers around x: 4 significant bits, fewer below 2^-6.
export const spacing = (x) => 2 ** (Math.max(exponentOf(x), SMALLEST_EXPONENT) - 3);

// To the nearest e4m3 number, of two the even one; what is larger than all becomes the largest, as on a GPU.
export function roundE4m3(x) {
  const steps = x / spacing(x);
  let nearest = Math.round(steps);
  if (Math.abs(steps % 1) === 0.5 && nearest % 2 !== 0) nearest -= 1; // Math.round takes ties upwards
  return Math.max(-LARGEST, Math.min(LARGEST, nearest * spacing(x)));
}

// Fields of an e4m3 number as text, and the two numbers that they stand for.
export function bitsOf(x) {
  const text = (n, length) => n.toString(2).padStart(length, "0");
  const steps = Math.abs(x) / spacing(x), isNormal = steps >= 8;
  const exponent = Math.max(exponentOf(x), SMALLEST_EXPONENT);
  return {
    sign: x < 0 || Object.is(x, -0) ? "1" : "0", exponent: text(isNormal ? exponent + 7 : 0, 4),
    fraction: text(steps % 8, 3), significand: steps / 8, power: exponent,
  };
}

// A factor for all rows, the least power of two that brings them to at most 448, and the rows over it in 8 bits.
export function quantize(rows) {
  const largest = Math.max(...rows.flat().map(Math.abs)), exponent = exponentOf(largest);
  const isOver = largest / 2 ** exponent > LARGEST / 256;
  const factor = largest === 0 ? 1 : 2 ** Math.max(-126, exponent - 8 + (isOver ? 1 : 0));
  const values = rows.map((row) => row.map((x) => roundE4m3(x / factor)));
  return { values, factor, numbers: values.map((row) => row.map((x) => x * factor)) };
}

// x H in float32: signs, then log2(dim) rounds of sums and differences. Zeros fill a row up to `signs`.
export function rotate(rows, signs) {
  return rows.map((row) => {
    const x = signs.map((sign, c) => sign * (row[c] ?? 0));
    for (let half = 1; half < x.length; half *= 2)
      for (let c = 0; c < x.length; c++)
        if ((c & half) === 0) [x[c], x[c + half]] = [x[c] + x[c + half], x[c] - x[c + half]];
    return x.map(Math.fround);
  });
}

const dot = (a, b) => a.reduce((sum, x, n) => sum + x * b[n], 0);
const products = (q, k, scale) => q.map((row) => k.map((other) => scale * dot(row, other)));
const exponentials = (s) => s.map((row) => row.map((x) => Math.exp(x - Math.max(...row))));

export const roundWeight = (p) => roundE4m3(Math.fround(p) * WEIGHT_FACTOR) / WEIGHT_FACTOR;

function weighted(p, factors, value) {
  return p.map((row, r) => value[0].map((_, c) => dot(row, value.map((v) => v[c])) / dot(factors[r], factors[r].map(() => 1))));
}

// Of the scores' squared errors, product by product: what each column has in them.
function errorShares(q, k, q8, k8) {
  const squares = q[0].map((_, c) => {
    let sum = 0;
    q.forEach((row, i) => k.forEach((other, j) => (sum += (q8.numbers[i][c] * k8.numbers[j][c] - row[c] * other[c]) ** 2)));
    return sum;
  });
  const total = squares.reduce((a, b) => a + b, 0);
  return squares.map((x) => (total === 0 ? 0 : x / total));
}

function way(q, k, value, scale, exact) {
  const q8 = quantize(q), k8 = quantize(k);
  const scores = products(q8.numbers, k8.numbers, scale);
  const weights = exponentials(scores);
  const out = weighted(weights.map((row) => row.map(roundWeight)), weights, quantize(value).numbers);
  return {
    q, k, q8, k8, scores, weights, out, unrounded: products(q, k, scale), shares: errorShares(q, k, q8, k8),
    errors: minus(scores, exact.scores), outErrors: minus(out, exact.out),
  };
}

const minus = (a, b) => a.map((row, r) => row.map((x, c) => x - b[r][c]));
export const rms = (rows) => Math.sqrt(dot(rows.flat(), rows.flat()) / rows.flat().length);

// Exact attention, and in 8 bits as it is and rotated. `signs` are those of the rotation of the padded head_dim.
export function walk(inputs, signs) {
  const [query, key, value] = ["query", "key", "value"].map((name) => inputs[name].map((row) => row.map(Math.fround)));
  const scale = query[0].length ** -0.5, scores = products(query, key, scale), p = exponentials(scores);
  const exact = { scores, out: weighted(p, p, value) };
  return {
    ...exact,
    plain: way(query, key, value, scale, exact),
    rotated: way(rotate(query, signs), rotate(key, signs), value, scale / signs.length, exact),
  };
}
