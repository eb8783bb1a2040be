// Small helpers to build the page: elements, matrices, numbers, commands to copy.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

// Screen readers hear `text`; the eye sees what changed.
export const announce = (text) => (byId("announcer").textContent = text);

// What a step says: seen, heard, and given back.
export function say(id, html) {
  byId(id).innerHTML = html;
  announce(byId(id).textContent);
  return byId(id).textContent;
}

// Whether `work` went well; what it throws stands in the element of this id.
export function attempt(id, work, sentence = (message) => message) {
  const place = byId(id);
  try {
    work();
    place.hidden = true;
  } catch (problem) {
    place.textContent = sentence(problem.message);
    place.hidden = false;
  }
  return place.hidden;
}

export function number(x, digits = 4) {
  if (x === null) return "";
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  if (Math.abs(x) < 1e6 && Number.isInteger(x)) return String(x).replace("-", "−");
  const text = Math.abs(x) < 0.5 * 10 ** -digits || Math.abs(x) >= 1e6 ? x.toExponential(digits - 1) : x.toFixed(digits);
  return text.replace("-", "−");
}

export const small = (x) => (x === 0 ? "0" : x.toExponential(1));
export const difference = (x, limit) => el("b", { class: x < limit ? "good" : "bad" }, small(x));

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = count, unit = 0;
  while (value >= 999.95 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit === 0 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value >= 1) return `${value.toPrecision(3)} s`;
  return value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} µs`;
}

export const count = (value) => value.toLocaleString("en-US");

// A matrix as a table. `look(r, c)` gives classes of a cell; `heads` names of rows and columns.
export function matrix(caption, rows, { look = () => "", digits = 3, rowHead, colHead } = {}) {
  const head = colHead
    ? el("thead", {}, el("tr", {}, rowHead ? el("td") : null, rows[0].map((_, c) => el("th", { scope: "col" }, colHead(c)))))
    : null;
  const body = rows.map((row, r) =>
    el(
      "tr",
      {},
      rowHead ? el("th", { scope: "row" }, rowHead(r)) : null,
      row.map((x, c) => el("td", { class: look(r, c) }, typeof x === "string" ? x : number(x, digits))),
    ),
  );
  return el("table", { class: "matrix" }, el("caption", {}, caption), head, el("tbody", {}, body));
}

// `look(r)` gives classes of a row.
export function table(caption, header, rows, look = () => null) {
  const cells = (tag, row) => row.map((x, n) => el(n === 0 ? "th" : tag, { scope: n === 0 && tag === "td" ? "row" : tag === "th" ? "col" : null }, x));
  return el(
    "table",
    { class: "facts" },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, cells("th", header))),
    el("tbody", {}, rows.map((row, r) => el("tr", { class: look(r) }, cells("td", row)))),
  );
}

// A command that reproduces what is shown, with a button that copies it.
export function command(target, text) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy the command: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // no clipboard from a file: the text is selected instead
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  target.replaceChildren(el("span", { "aria-hidden": "true" }, "$ "), code, button);
}

// Draw a figure as wide as its place, so that its text keeps its size, and again when the place changes.
export function figure(place, draw) {
  const redraw = () => place.replaceChildren(draw(Math.max(300, Math.min(1010, place.clientWidth || 720))));
  addEventListener("resize", redraw);
  return redraw;
}

// `entries`: what is chosen, which is what is shown, or [what is chosen, what is shown].
export function options(select, entries, chosen) {
  const option = ([value, text]) => el("option", { value, selected: value === chosen }, text);
  select.replaceChildren(...entries.map((entry) => option(Array.isArray(entry) ? entry : [entry, entry])));
}

// Buttons, slider and arrow keys that walk through steps 0..last; `show(position)` draws one. Starts them anew, at 1.
export function stepper(root, label, show) {
  const slider = el("input", { type: "range", min: 0, value: 0, step: 1, "aria-label": `${label}: step` });
  const place = el("output", { class: "place" });
  let timer = null;
  const set = (position) => {
    slider.value = Math.max(0, Math.min(Number(slider.max), position));
    place.textContent = `${slider.value} / ${slider.max}`;
    slider.setAttribute("aria-valuetext", show(Number(slider.value)));
  };
  const move = (by) => set(Number(slider.value) + by);
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const toggle = () => {
    if (timer !== null) return stop();
    if (slider.value === slider.max) set(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => (slider.value === slider.max ? stop() : move(1)), 900);
  };
  const button = (text, name, act) => el("button", { type: "button", "aria-label": `${label}: ${name}`, onclick: act }, text);
  const play = button("Play", "play", toggle);
  play.setAttribute("aria-pressed", "false");
  const by = (amount) => () => {
    stop();
    move(amount);
  };
  root.replaceChildren(
    button("«", "first step", by(-Infinity)), button("‹", "previous step", by(-1)), play,
    button("›", "next step", by(1)), button("»", "last step", by(Infinity)), slider, place,
  );
  slider.addEventListener("input", () => {
    stop();
    set(Number(slider.value));
  });
  return (last) => {
    stop();
    slider.max = last;
    set(1);
  };
}

const tensor = (rows) => `torch.tensor(${JSON.stringify(rows)}, dtype=torch.float64)`;

// A line of Python that traces numbers which are no example of `tilewise trace`.
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
