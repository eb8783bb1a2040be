// Part 6: how a cache grows, and how pages are handed out.

import { announce, byId, bytes, command, count, el, figure, options, svg, table } from "./elements.js";

const COLOURS = ["var(--q)", "var(--k)", "var(--v)", "var(--accent)"];
const POOL = 24, LONGEST = 96, SLOTS = 8; // pages, tokens reserved by a contiguous cache, marks drawn for a page
const START = [37, 9, 62, 20]; // tokens of each sequence, which grew side by side
const HEIGHT = 240, LEFT = 70, RIGHT = 26, TOP = 14, BOTTOM = 34;

export function cachePart(data) {
  growth(data);
  paging();
}

function cacheBytes(model, context, batch) {
  const tokens = (model.layers - model.windowed) * context + model.windowed * Math.min(context, model.window);
  return batch * tokens * model.numbers_per_token * 2;
}

function growth(data) {
  const { models, contexts } = data.kv, memory = data.machines.find((m) => m.name === "H200").levels.at(-1).bytes;
  options(byId("cache-model"), models.map((m) => m.name), "llama-2-70b");
  const slider = byId("cache-context");
  slider.max = contexts.length - 1;
  slider.value = contexts.indexOf(4096);

  let shown = null;
  const drawChart = figure(byId("cache-growth"), (width) => chart(shown, width));

  function update() {
    const model = models.find((m) => m.name === byId("cache-model").value);
    const context = contexts[slider.value], batch = Math.max(1, Math.floor(Number(byId("cache-batch").value)) || 1);
    const size = cacheBytes(model, context, batch);
    const every = batch * context * model.layers * 2 * model.heads * model.head_dim * 2;
    byId("cache-n").textContent = `${count(context)} tokens`;
    slider.setAttribute("aria-valuetext", `${context} tokens`);
    shown = { model, batch, context, size };
    drawChart();
    const fits = Math.floor(memory / cacheBytes(model, context, 1));
    byId("cache-fact").innerHTML =
      `<b>${bytes(model.bytes_per_token)}</b> a token; <b>${bytes(size)}</b> for ${count(batch)} × ${count(context)} tokens in 16 bits. ` +
      `With keys and values for every query head it would be <b>${bytes(every)}</b>, ${Number((every / size).toPrecision(3))} times as much. ` +
      `The ${bytes(memory)} of an H200 hold <b>${count(fits)}</b> such sequences, weights aside.`;
    command(byId("cache-command"), `tilewise kv-memory --model ${model.name} --context ${context} --batch ${batch}`);
  }

  // Both axes logarithmic: contexts double, caches span six orders of magnitude.
  function chart({ model, batch, context, size }, width) {
    const sizes = contexts.map((c) => cacheBytes(model, c, batch));
    const low = Math.floor(Math.log10(sizes[0])), high = Math.ceil(Math.log10(Math.max(sizes.at(-1), memory)));
    const x = (c) => LEFT + (Math.log2(c / contexts[0]) / Math.log2(contexts.at(-1) / contexts[0])) * (width - LEFT - RIGHT);
    const y = (b) => HEIGHT - BOTTOM - ((Math.log10(b) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const powers = Array.from({ length: high - low + 1 }, (_, n) => low + n);
    return svg(
      "svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `Cache of ${model.name} over the context: ${bytes(sizes[0])} at ${contexts[0]} tokens, ${bytes(sizes.at(-1))} at ${contexts.at(-1)}.` },
      powers.map((p) => [
        svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(10 ** p), y2: y(10 ** p), class: "grid" }),
        svg("text", { x: LEFT - 8, y: y(10 ** p) + 4, "text-anchor": "end", class: "quiet" }, bytes(10 ** p)),
      ]),
      contexts.filter((_, n) => n % 2 === 0).map((c) => svg("text", { x: x(c), y: HEIGHT - 10, "text-anchor": "middle", class: "quiet" }, c >= 2 ** 20 ? `${c / 2 ** 20}M` : c >= 1024 ? `${c / 1024}k` : c)),
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(memory), y2: y(memory), stroke: "var(--warn)", "stroke-width": 1.5, "stroke-dasharray": "7 5" }),
      svg("text", { x: LEFT + 8, y: y(memory) - 6 }, "memory of an H200"),
      svg("polyline", { points: contexts.map((c, n) => `${x(c)},${y(sizes[n])}`).join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2.5 }),
      svg("circle", { cx: x(context), cy: y(size), r: 6, fill: "var(--accent)" }),
    );
  }

  byId("cache").querySelector("form").addEventListener("input", update);
  update();
}

function paging() {
  options(byId("cache-page"), ["4", "8", "16", "32"], "16");
  let lengths = [], tables = [];

  function clear() {
    lengths = [0, 0, 0, 0];
    tables = [[], [], [], []];
    for (let round = 0; round < 8; round++) START.forEach((length, n) => grow(n, Math.min(8, Math.max(0, length - 8 * round))));
    draw();
  }

  // The next token of a full (or no) page takes the first free page of the pool.
  function grow(sequence, tokens) {
    const size = Number(byId("cache-page").value);
    for (let t = 0; t < tokens; t++) {
      if (lengths[sequence] % size === 0) {
        const taken = new Set(tables.flat());
        const free = Array.from({ length: poolSize() }, (_, page) => page).find((page) => !taken.has(page));
        if (free === undefined) return announce("The pool is full.");
        tables[sequence].push(free);
      }
      lengths[sequence] += 1;
    }
  }

  const poolSize = () => Math.max(POOL, Math.ceil((POOL * 16) / Number(byId("cache-page").value)));

  function draw() {
    const size = Number(byId("cache-page").value);
    byId("cache-sequences").replaceChildren(
      ...lengths.map((length, n) =>
        el("button", { type: "button", "aria-label": `Sequence ${n}, ${length} tokens: one more`, onclick: () => (grow(n, 1), draw(), byId("cache-sequences").children[n].focus()) }, `+1 for sequence ${n}`),
      ),
    );
    byId("cache-pool").replaceChildren(...Array.from({ length: poolSize() }, (_, page) => pageBox(page, size)));
    byId("cache-table").replaceChildren(
      table("Page tables", ["sequence", "tokens", "pages, in order", "empty slots"],
        lengths.map((length, n) => [`${n}`, count(length), tables[n].join(" "), count(tables[n].length * size - length)])),
    );
    const used = lengths.reduce((a, b) => a + b, 0), paged = tables.flat().length * size;
    const longest = Math.max(LONGEST, ...lengths), reserved = lengths.length * longest;
    byId("cache-waste").innerHTML =
      `${count(used)} tokens lie in ${count(paged)} slots: <b>${count(paged - used)}</b> empty, fewer than a page a sequence. ` +
      `Reserving ${longest} for each takes ${count(reserved)} slots, <b>${count(reserved - used)}</b> of them empty.`;
    command(byId("cache-pages-command"), pagesCommand(size));
  }

  const pagesCommand = (size) =>
    `tilewise kv-memory --lengths ${lengths.join(",")} --page-size ${size} --longest ${Math.max(LONGEST, ...lengths)}`;

  function pageBox(page, size) {
    const owner = tables.findIndex((pages) => pages.includes(page));
    const first = owner < 0 ? 0 : tables[owner].indexOf(page) * size;
    const filled = owner < 0 ? 0 : Math.min(size, lengths[owner] - first);
    const marks = Math.min(SLOTS, size);
    const slots = Array.from({ length: marks }, (_, n) => el("i", { class: (n * size) / marks < filled ? "used" : "" }));
    const text = owner < 0 ? "free" : `seq ${owner}`;
    return el("div", { class: owner < 0 ? "page" : "page taken", style: `--colour:${COLOURS[owner] ?? "inherit"}` }, `${page}: ${text}`, el("div", { class: "slots" }, slots));
  }

  byId("cache-page").addEventListener("input", clear);
  byId("cache-all").addEventListener("click", () => {
    lengths.forEach((_, n) => grow(n, 8));
    draw();
    announce(byId("cache-waste").textContent);
  });
  byId("cache-clear").addEventListener("click", clear);
  clear();
}
