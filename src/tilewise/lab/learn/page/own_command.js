// A line of Python that traces numbers which are no example of `tilewise trace`.

const tensor = (rows) => `torch.tensor(${JSON.stringify(rows)}, dtype=torch.float64)`;

export function ownCommand({ query, key, value }, { blockQ, blockK, order, scale, causal }, dout) {
  const options = `scale=${scale}, causal=${causal ? "True" : "False"}`;
  const tensors = [query, key, value, ...(dout ? [dout] : [])].map(tensor).join(", ");
  const call = dout
    ? `trace.backward(${tensors}, ${blockQ}, ${blockK}, ${options})`
    : `trace.forward(${tensors}, ${blockQ}, ${blockK}, order='${order}', ${options})`;
  return `python -c "import torch; from tilewise.learn import trace; print(${call})"`;
}

// The same for 8-bit attention of one query.
export function ownFp8Command({ query, key, value }, row) {
  const tensors = [query, key, value].map(tensor).join(", ");
  return `python -c "import torch; from tilewise.learn import eight_bits, show; walk = eight_bits.walk(${tensors}); print(show.as_text(eight_bits.sections(walk, ${row})))"`;
}
