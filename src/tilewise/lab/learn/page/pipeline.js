// Part 5: the timeline of the kernel's warps.

import { announce, byId, command, count, el, options, svg } from "./elements.js";

const WIDTH = 1000, LABEL = 108, LANE = 26, GAP = 12, TOP = 26;
const KINDS = {
  "copy K": ["copy of K", "var(--k)"], "copy V": ["copy of V", "var(--v)"], "Q K": ["Q Kᵀ on the tensor cores", "var(--accent)"],
  "P V": ["P V on the tensor cores", "var(--q)"], softmax: ["softmax", "#b58a00"], rescale: ["rescale acc", "#7d6a3a"],
  wait: ["waiting", "var(--wait)"],
};

export function pipelinePart(data) {
  const ids = { dim: "pipeline-dim", groups: "pipeline-groups", stages: "pipeline-stages" };
  const schedules = data.pipeline.schedules;
  const values = (name) => [...new Set(schedules.map((schedule) => String(schedule[name])))];
  options(byId(ids.dim), values("head_dim"), "128");
  options(byId(ids.groups), values("warpgroups"));
  options(byId(ids.stages), values("stages"));
  let chosen = 0, shown = null, drawn = [];

  function asKernel() {
    const kernel = data.pipeline.kernel[byId(ids.dim).value];
    byId(ids.groups).value = kernel.warpgroups;
    byId(ids.stages).value = kernel.stages;
    byId("pipeline-overlap").checked = kernel.overlap;
    byId("pipeline-pingpong").checked = kernel.ping_pong;
    update();
  }

  function find() {
    const wanted = {
      head_dim: Number(byId(ids.dim).value), warpgroups: Number(byId(ids.groups).value), stages: Number(byId(ids.stages).value),
      overlap: byId("pipeline-overlap").checked, ping_pong: byId("pipeline-pingpong").checked,
    };
    return schedules.find((schedule) => Object.entries(wanted).every(([name, value]) => schedule[name] === value));
  }

  // Products and arithmetic of a warpgroup overlap: they have a lane each.
  function lanesOf(schedule) {
    const groups = Array.from({ length: schedule.warpgroups }, (_, w) => `warpgroup ${w}`);
    return ["producer", ...groups.flatMap((name) => [`${name}: products`, `${name}: softmax`])];
  }

  function laneOf({ lane, kind }) {
    if (lane === "producer") return lane;
    return `${lane}: ${kind === "Q K" || kind === "P V" ? "products" : "softmax"}`;
  }

  const describe = (span) => {
    const work = span.kind === "wait" ? "waits" : KINDS[span.kind][0];
    return `${span.lane}, ${work}, tile ${span.tile}: cycle ${count(Math.round(span.start))} to ${count(Math.round(span.end))}`;
  };

  function update() {
    shown = find();
    const spans = shown.spans.map(([lane, kind, tile, start, end]) => ({ lane: data.pipeline.lanes[lane], kind: data.pipeline.kinds[kind], tile, start, end }));
    const lanes = lanesOf(shown), kernel = data.pipeline.kernel[shown.head_dim];
    const scale = (WIDTH - LABEL - 8) / Math.max(shown.cycles, kernel.cycles);
    const y = (lane) => TOP + lanes.indexOf(lane) * (LANE + 4) + GAP * Math.ceil(lanes.indexOf(lane) / 2);
    drawn = spans.map((span) => {
      const isWait = span.kind === "wait", show = () => choose(drawn.findIndex((one) => one.rect === rect), false);
      const rect = svg("rect", {
        x: LABEL + span.start * scale, y: y(laneOf(span)) + (isWait ? LANE * 0.38 : 0), width: Math.max(1, (span.end - span.start) * scale),
        height: isWait ? LANE * 0.24 : LANE, rx: 2, class: "span", fill: KINDS[span.kind][1],
        onmouseenter: show, onclick: show,
      });
      return { span, rect };
    }).sort((a, b) => a.span.start - b.span.start);
    const waitsFirst = [...drawn].sort((a, b) => Number(b.span.kind === "wait") - Number(a.span.kind === "wait"));
    const height = y(lanes.at(-1)) + LANE + 26;
    const isKernel = ["warpgroups", "stages", "overlap", "ping_pong"].every((name) => kernel[name] === shown[name]);
    const end = LABEL + shown.cycles * scale;
    const chart = svg(
      "svg", { viewBox: `0 0 ${WIDTH} ${height}`, tabindex: 0, role: "img", "aria-label": `Timeline of ${drawn.length} pieces of work in ${lanes.length} lanes. Arrow keys move along it.`, onkeydown: onKey },
      lanes.map((lane) => [
        svg("text", { x: 0, y: y(lane) + 17 }, lane.replace("warpgroup ", "WG ")),
        svg("line", { x1: LABEL, x2: WIDTH, y1: y(lane) + LANE / 2, y2: y(lane) + LANE / 2, class: "grid" }),
      ]),
      waitsFirst.map(({ rect }) => rect),
      svg("line", { x1: end, x2: end, y1: TOP - 6, y2: height - 22, stroke: "var(--ink)", "stroke-width": 1.5 }),
      svg("text", { x: end, y: height - 6, "text-anchor": "end" }, `${count(Math.round(shown.cycles))} cycles`),
    );
    byId("pipeline-chart").replaceChildren(chart);
    byId("pipeline-summary").innerHTML =
      `${shown.key_tiles} key tiles of ${shown.block_n}, ${shown.warpgroups * data.pipeline.rows} queries: <b>${count(Math.round(shown.cycles))} cycles</b>, ` +
      `tensor cores busy <b>${(shown.tensor_core_use * 100).toFixed(0)}%</b> of them${isKernel ? ": the kernel's own configuration." : `; as the kernel: ${(kernel.tensor_core_use * 100).toFixed(0)}%.`}`;
    chosen = 0;
    command(byId("pipeline-command"), terminalCommand(shown));
  }

  const terminalCommand = (s) =>
    `tilewise pipeline --head-dim ${s.head_dim} --warpgroups ${s.warpgroups} --stages ${s.stages}` +
    `${s.overlap ? "" : " --no-overlap"}${s.ping_pong ? " --ping-pong" : ""} --spans`;

  function choose(n, aloud) {
    if (n < 0 || n >= drawn.length) return;
    drawn[chosen].rect.classList.remove("chosen");
    chosen = n;
    drawn[n].rect.classList.add("chosen");
    byId("pipeline-says").textContent = describe(drawn[n].span);
    if (aloud) announce(describe(drawn[n].span));
  }

  function onKey(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(drawn.length - 1, chosen + by)), true);
  }

  byId("pipeline-legend").replaceChildren(
    ...Object.values(KINDS).map(([text, colour]) => el("span", {}, el("i", { style: `--colour:${colour}` }), text)),
  );
  byId("pipeline").querySelector("form").addEventListener("input", (event) => (event.target.id === ids.dim ? asKernel() : update()));
  byId("pipeline-reset").addEventListener("click", asKernel);
  asKernel();
}
