// The inputs and settings of the walk: an example, or what the reader typed. Parts 1 and 4 share them.

import { attempt, byId, options } from "./elements.js";
import { checkInputs, parseMatrix } from "./arithmetic.js";

const OWN = "own";
const FIELDS = { query: "tiles-q", key: "tiles-k", value: "tiles-v" };

// The matrices in text fields, by name; `limits` are those of `parseMatrix`.
export function typedInputs(fields, limits) {
  const inputs = {};
  for (const [name, id] of Object.entries(fields)) {
    try {
      inputs[name] = parseMatrix(byId(id).value, limits);
    } catch (error) {
      throw new Error(`${name[0].toUpperCase() + name.slice(1)} ${error.message}.`);
    }
  }
  checkInputs(inputs);
  return inputs;
}

export function walkInputs(examples, changed) {
  const byName = Object.fromEntries(examples.map((example) => [example.name, example]));
  options(byId("tiles-example"), [...Object.keys(byName), [OWN, "my own"]], examples[0].name);

  const write = (example) => {
    for (const [name, id] of Object.entries(FIELDS)) byId(id).value = example[name].map((row) => row.join(" ")).join("\n");
    byId("tiles-block-q").value = example.block_q;
    byId("tiles-block-k").value = example.block_k;
    byId("tiles-scale").value = example.scale;
  };

  const wholeNumber = (id, name) => {
    const value = Number(byId(id).value);
    if (!Number.isInteger(value) || value < 1) throw new Error(`${name} must be a whole number of at least 1.`);
    return value;
  };

  const current = () => {
    const scale = Number(byId("tiles-scale").value);
    if (byId("tiles-scale").value === "" || !Number.isFinite(scale)) throw new Error("Scale must be a number.");
    const settings = {
      order: document.querySelector("input[name=order]:checked").value,
      normalize: "end",
      causal: byId("tiles-causal").checked,
      blockQ: wholeNumber("tiles-block-q", "Queries a tile"),
      blockK: wholeNumber("tiles-block-k", "Keys a tile"),
      scale,
    };
    const inputs = typedInputs(FIELDS);
    const example = byName[byId("tiles-example").value];
    const dout = example?.dout ?? inputs.query.map(() => inputs.value[0].map(() => 1));
    return { inputs, settings, dout, example };
  };

  const update = () => attempt("tiles-error", () => changed(current()));

  byId("tiles-settings").addEventListener("input", (event) => {
    const example = event.target.id === "tiles-example" ? byName[event.target.value] : null;
    if (example) write(example);
    if (event.target.value === OWN) byId("tiles-own").open = true;
    update();
  });
  byId("tiles-own").addEventListener("input", () => {
    byId("tiles-example").value = OWN;
    update();
  });
  write(examples[0]);
  update();
}
