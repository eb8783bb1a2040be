// Part 3: the levels of memory, and the bytes that each algorithm moves.

import { byId, bytes, command, count, el, options, seconds, table } from "./elements.js";

const ALGORITHMS = ["standard", "fa1", "fa2"];
const COLOURS = { standard: "var(--q)", fa1: "var(--v)", fa2: "var(--k)" };
const TINTS = ["#f3c7a5", "#f0dc9f", "#b9dfae", "#a9c9f0"];
const LONGEST = 3000; // milliseconds that the slowest bar takes to fill

export function memoryPart(data) {
  const { lengths, costs } = data.io;
  options(byId("memory-machine"), data.machines.map((m) => m.name), "H200");
  options(byId("memory-dim"), Object.keys(costs), "128");
  const slider = byId("memory-length");
  slider.max = lengths.length - 1;
  slider.value = lengths.indexOf(4096);
  const machine = () => data.machines.find((m) => m.name === byId("memory-machine").value);
  const chosen = () => {
    const { fa1, ...others } = costs[byId("memory-dim").value][lengths[slider.value]];
    return { ...others, fa1: fa1[machine().name] };
  };
  const names = () => ({
    standard: "Standard, S and P stored", fa1: `FlashAttention, M = ${machine().fast_kib} KiB`, fa2: "FlashAttention-2, 128 × 128",
  });
  let frame = null;

  function drawLevels() {
    const { levels } = machine();
    const buttons = levels.map((level, n) =>
      el(
        "button",
        {
          type: "button", style: `--width:${54 + (46 * n) / (levels.length - 1)}%;--tint:${TINTS[n]}`, "aria-pressed": "false",
          onmouseenter: () => tell(n), onfocus: () => tell(n), onclick: () => tell(n),
        },
        el("span", {}, level.name), el("span", {}, bytes(level.bytes * level.units)),
      ),
    );
    byId("memory-levels").replaceChildren(...buttons);
    tell(levels.length - 1);
  }

  function tell(n) {
    const { levels, clock_hz: clock } = machine(), level = levels[n], largest = levels.at(-1);
    [...byId("memory-levels").children].forEach((button, k) => button.setAttribute("aria-pressed", String(k === n)));
    const each = level.units > 1 ? `${bytes(level.bytes)} in each of ${level.units} multiprocessors, ${bytes(level.bytes * level.units)} in all` : bytes(level.bytes);
    const rate = level.bytes_per_second === null ? "a bandwidth that nobody publishes" : `${bytes(level.bytes_per_second)}/s${level === largest ? "" : `, ${(level.bytes_per_second / largest.bytes_per_second).toFixed(1)} times ${largest.name}`}`;
    const late = level.latency_cycles === null ? "" : `; about ${level.latency_cycles} cycles (${((level.latency_cycles / clock) * 1e9).toFixed(0)} ns) until the first byte`;
    byId("memory-level-says").innerHTML = `<b>${level.name}</b>: ${each}; ${rate}${late}.`;
  }

  function bar(name, entry, largest) {
    const fill = el("div", { class: "fill", style: `--colour:${COLOURS[name]};width:${(entry.slow_bytes / largest) * 100}%` });
    fill.dataset.share = entry.slow_bytes / largest;
    return el(
      "div", { class: "bar" },
      el("div", { class: "name" }, el("span", {}, names()[name]), el("b", {}, bytes(entry.slow_bytes))),
      el("div", { class: "track" }, fill),
    );
  }

  function update() {
    const n = lengths[slider.value], entries = chosen();
    byId("memory-n").textContent = `N = ${count(n)}`;
    slider.setAttribute("aria-valuetext", `${n}`);
    stop();
    const largest = Math.max(...ALGORITHMS.map((name) => entries[name].slow_bytes));
    byId("memory-bars").replaceChildren(...ALGORITHMS.map((name) => bar(name, entries[name], largest)));
    const { standard, fa2 } = entries, rate = machine().bytes_per_second;
    byId("memory-says").innerHTML =
      `One head of ${byId("memory-dim").value}: storing S and P moves <b>${(standard.slow_bytes / fa2.slow_bytes).toFixed(1)} times</b> as much ` +
      `as FlashAttention-2's loops and needs <b>${bytes(standard.extra_bytes)}</b> of extra memory instead of <b>${bytes(fa2.extra_bytes)}</b>. ` +
      `At ${bytes(rate)}/s it takes at least ${seconds(standard.slow_bytes / rate)} for bytes alone.`;
    const rows = ALGORITHMS.map((name) => {
      const entry = entries[name];
      const tensors = Object.entries(entry.moved).sort((a, b) => b[1] - a[1]).map(([tensor, total]) => `${tensor} ${bytes(total)}`);
      return [names()[name], bytes(entry.read), bytes(entry.written), entry.intensity.toFixed(1), tensors.slice(0, 4).join(", ")];
    });
    byId("memory-table").replaceChildren(table("To and from slow memory; 16-bit numbers", ["", "read", "written", "FLOP/byte", "most of it"], rows));
    const dim = byId("memory-dim").value;
    command(byId("memory-command"), `tilewise io --seqlen ${n} --head-dim ${dim} --sram ${machine().fast_kib} --detail`);
    command(byId("memory-roofline"), `tilewise roofline --device ${machine().name} --seqlen ${n} --head-dim ${dim} --heads 1 --batch 1`);
  }

  // Bars fill at the speed at which a byte moves: all at the same rate, so the shortest is done first.
  function play() {
    const fills = [...document.querySelectorAll("#memory-bars .fill")], start = performance.now();
    stop();
    const draw = (now) => {
      const moved = Math.min(1, (now - start) / LONGEST);
      fills.forEach((fill) => (fill.style.width = `${Math.min(moved, Number(fill.dataset.share)) * 100}%`));
      frame = moved < 1 ? requestAnimationFrame(draw) : null;
    };
    frame = requestAnimationFrame(draw);
  }

  function stop() {
    if (frame !== null) cancelAnimationFrame(frame);
    frame = null;
  }

  byId("memory-machine").addEventListener("input", () => (drawLevels(), update()));
  byId("memory-dim").addEventListener("input", update);
  slider.addEventListener("input", update);
  byId("memory-play").addEventListener("click", play);
  drawLevels();
  update();
}
