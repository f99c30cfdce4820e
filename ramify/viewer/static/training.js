// Training: every measured name as a curve over the steps, a second run laid over it, and the rollouts that were kept.

import uPlot from "./vendor/uplot.js";
import { h, fill, toast } from "./dom.js";
import { get, follow } from "./api.js";
import { runAddress } from "./run.js";
import { count, many, number, oneLine, seconds, stopWords } from "./format.js";

// What belongs together, in this order; what is in no group comes last.
const GROUPS = [
  ["reward", /^(reward|child_reward|groups_with_signal|.*\/reward)$/],
  ["pass@k and other evaluations", /pass[@_]|^(validation|test|train)\//],
  ["loss", /(^|_)loss$|^grad_norm$|^lr$/],
  ["policy: KL, entropy, clip share", /kl$|entropy|clip/],
  ["off-policy: sampler mismatch, effective sample size, staleness", /mismatch|^ess$|stale/],
  ["per depth and role", /depth|role|^calls_per_rollout$|^turns_per_call$|child_/],
  ["speed", /tokens_per_s|_s$|cpu/],
  ["rollouts and sizes", /./],
];
const MAX_ROWS = 5;  // samples of each end

export async function trainingPage(page, keys) {
  const { trainings } = await get("/api/runs");
  document.title = "Training · Ramify";
  if (!trainings.length) {
    fill(page, h("div.empty", null, h("h1", null, "Training"), h("p", null, "No folder of ramify train is among the paths that were given."),
      h("p", null, "One is shown by ", h("code", null, "ramify view runs/mine"))));
    return null;
  }
  const view = new TrainingView(trainings, keys[0] || trainings[0].key, keys[1] || "");
  await view.start(page);
  return view;
}

class TrainingView {
  constructor(trainings, key, other) {
    Object.assign(this, { trainings, key, otherKey: other === key ? "" : other });
    this.charts = new Map();  // name -> { element, plot, holder, latest }
    this.byTime = false;
  }

  async start(page) {
    this.link = h("link", { rel: "stylesheet", href: "/static/vendor/uplot.css" });
    document.head.append(this.link);
    this.data = await get("/api/training", { key: this.key });
    this.other = this.otherKey ? await get("/api/training", { key: this.otherKey }) : null;
    const option = (each, chosen) => h("option", { value: each.key, selected: each.key === chosen }, this.nameOf(each));
    const choose = h("select", { "aria-label": "training run", onchange: () => this.go(choose.value, this.otherKey) }, this.trainings.map((each) => option(each, this.key)));
    const overlay = h("select", { "aria-label": "laid over it", onchange: () => this.go(this.key, overlay.value) }, h("option", { value: "" }, "overlay: none"),
      this.trainings.filter((each) => each.key !== this.key).map((each) => option(each, this.otherKey)));
    this.filter = h("input", { type: "search", id: "filter", placeholder: "filter curves", "aria-label": "filter curves", oninput: () => this.draw() });
    this.standing = h("span.quiet");
    this.problems = h("div.problems");
    this.tiles = h("dl.tiles");
    this.samples = h("section.samples", { hidden: true, "aria-label": "rollouts of a step" });
    this.grid = h("div.charts");
    fill(page, h("div.wide", null, h("div.wide-head", null, h("h1", null, "Training"), h("div.choose", null, choose, this.trainings.length > 1 ? overlay : null, this.filter), this.standing),
      this.problems, this.tiles, h("div.beside", null, this.grid, this.samples)));
    this.draw();
    if (this.data.kept.length) this.showStep(this.data.kept[this.data.kept.length - 1]);
    this.stop = follow("/api/training/events", { key: this.key }, () => this.data.version ?? 0, (data) => {
      this.data = { ...data };
      this.draw();
    });
    this.resize = new ResizeObserver(() => this.size());
    this.resize.observe(this.grid);
    this.recolour = () => this.again();
    addEventListener("ramify-theme", this.recolour);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.recolour);
  }

  close() {
    this.stop();
    this.resize.disconnect();
    removeEventListener("ramify-theme", this.recolour);
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.recolour);
    for (const chart of this.charts.values()) chart.plot.destroy();
    this.link.remove();
  }

  nameOf(each) {
    const same = this.trainings.filter((other) => other.name === each.name).length > 1;
    return same ? each.folder : each.name;
  }

  go(key, other) {
    location.hash = `#/training/${encodeURIComponent(key)}${other && other !== key ? `/${encodeURIComponent(other)}` : ""}`;
  }

  // --- curves ---------------------------------------------------------------------------------------------------

  draw() {
    const data = this.data, stages = data.stages.map(([name, step]) => `${name} from ${step}`).join(", ");
    this.standing.textContent = `step ${number(data.step)} · ${seconds(data.at_s)}${stages ? ` · ${stages}` : ""}`;
    fill(this.problems, [...data.problems, ...(this.other ? this.other.problems : [])].map((text) => h("p.problem", { role: "alert" }, text)));
    this.drawTiles();
    const words = this.filter.value.toLowerCase(), wanted = Object.keys(data.names).filter((name) => name.toLowerCase().includes(words));
    const left = new Set(wanted), order = [];
    for (const [title, pattern] of GROUPS) {
      const members = [...left].filter((name) => pattern.test(name));
      members.forEach((name) => left.delete(name));
      if (members.length) order.push([title, members.sort(byImportance)]);
    }
    const signature = JSON.stringify(order);
    if (signature !== this.signature) {
      this.signature = signature;
      for (const [name, chart] of this.charts) {
        if (!wanted.includes(name)) {
          chart.plot.destroy();
          this.charts.delete(name);
        }
      }
      fill(this.grid, order.map(([title, members]) => [h("h2.group-title", null, title), members.map((name) => this.chart(name).element)]));
      if (!order.length) fill(this.grid, h("p.quiet", null, Object.keys(data.names).length ? "no curve of that name" : "nothing was measured yet"));
      this.size();
    }
    for (const [name, chart] of this.charts) {
      chart.plot.setData(this.aligned(name));
      const values = data.names[name][1], second = this.other?.names[name]?.[1];
      chart.latest.textContent = `${number(values[values.length - 1])}${second ? ` · ${number(second[second.length - 1])}` : ""}`;
    }
  }

  drawTiles() {
    const found = [], last = (name) => this.data.names[name]?.[1].at(-1);
    for (const name of ["reward", "validation/reward"]) if (last(name) !== undefined) found.push([`${name} now`, number(last(name))]);
    for (const { stage, values } of this.data.final) for (const [name, value] of Object.entries(values)) if (/reward$|pass/.test(name)) found.push([`${stage}: ${name}`, number(value)]);
    if (last("tokens_per_s") !== undefined) found.push(["tokens per second", count(last("tokens_per_s"))]);
    fill(this.tiles, found.map(([name, value]) => h("div.tile", null, h("dt", null, name), h("dd", null, value))));
    this.tiles.hidden = !found.length;
  }

  // Both runs over all steps that either has: [steps, ours, theirs].
  aligned(name) {
    const [steps, values] = this.data.names[name], second = this.other ? this.other.names[name] : null;
    if (!this.other) return [steps, values];
    if (!second) return [steps, values, steps.map(() => null)];
    const all = [...new Set([...steps, ...second[0]])].sort((a, b) => a - b);
    const spread = ([at, what]) => {
      const known = new Map(at.map((step, index) => [step, what[index]]));
      return all.map((step) => known.get(step) ?? null);
    };
    return [all, spread([steps, values]), spread(second)];
  }

  chart(name) {
    if (this.charts.has(name)) return this.charts.get(name);
    const latest = h("span"), holder = h("div.plot");
    const element = h("section.chart", { "aria-label": name, "data-name": name }, h("h3", null, name, latest), holder);
    const chart = { element, holder, latest, plot: this.plot(name, holder, latest) };
    this.charts.set(name, chart);
    return chart;
  }

  plot(name, holder, latest) {
    const style = getComputedStyle(document.documentElement), colour = (each) => style.getPropertyValue(each).trim();
    const axis = { stroke: colour("--ink-3"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
    const few = this.data.names[name][0].length < 60;
    const series = [{ label: "step" }, { label: this.data.name, stroke: colour("--rlm"), width: 1.6, spanGaps: true, points: { show: few, size: 4 } }];
    if (this.other) series.push({ label: this.other.name, stroke: colour("--warn"), width: 1.6, dash: [5, 3], spanGaps: true, points: { show: false } });
    const plot = new uPlot({
      width: Math.max(holder.clientWidth, 300), height: 180, series, scales: { x: { time: false } }, legend: { show: false }, padding: [8, 10, 0, 0],
      axes: [{ ...axis, size: 26 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((each) => (each === null ? "" : number(each))) }],
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "training" } },
      hooks: {
        setCursor: [(self) => this.said(self, name, latest)],
        draw: [(self) => this.drawStages(self, colour("--line-2"), colour("--ink-3"))],
      },
    }, this.aligned(name), holder);
    plot.over.addEventListener("click", () => this.clicked(plot));
    return plot;
  }

  // The values under the pointer stand where the latest stood.
  said(plot, name, latest) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      const values = this.data.names[name]?.[1] || [], second = this.other?.names[name]?.[1];
      latest.textContent = `${number(values.at(-1) ?? null)}${second ? ` · ${number(second.at(-1))}` : ""}`;
      return;
    }
    const shown = plot.data.slice(1).map((each) => number(each[at] ?? null));
    latest.textContent = `step ${number(plot.data[0][at])}: ${shown.join(" · ")}`;
  }

  drawStages(plot, line, ink) {
    const pen = plot.ctx, { left, top, width, height } = plot.bbox;
    pen.save();
    pen.fillStyle = ink;
    pen.textAlign = "left";
    pen.strokeStyle = line;
    pen.font = `${10 * devicePixelRatio}px system-ui`;
    for (const [name, step] of this.data.stages.length > 1 ? this.data.stages : []) {
      const x = plot.valToPos(step, "x", true);
      if (x < left || x > left + width) continue;
      pen.beginPath();
      pen.setLineDash([3, 3]);
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.fillText(name, x + 3, top + 10 * devicePixelRatio);
    }
    pen.restore();
  }

  clicked(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || !this.data.kept.length) return;
    const step = plot.data[0][at];
    this.showStep(this.data.kept.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best)));
  }

  size() {
    for (const chart of this.charts.values()) {
      const width = chart.holder.clientWidth;
      if (width && Math.abs(width - chart.plot.width) > 1) chart.plot.setSize({ width, height: 180 });
    }
  }

  again() {
    for (const chart of this.charts.values()) chart.plot.destroy();
    this.charts.clear();
    this.signature = "";
    this.draw();
  }

  // --- rollouts of a step ---------------------------------------------------------------------------------------

  async showStep(step) {
    try {
      this.drawSamples(await get("/api/samples", { key: this.key, step }));
    } catch (error) {
      toast(error.message);
    }
  }

  drawSamples({ step, rows, problems, depths }) {
    this.step = step;
    const kept = this.data.kept, at = kept.indexOf(step), move = (by) => this.showStep(kept[Math.min(kept.length - 1, Math.max(0, at + by))]);
    const shown = rows.length <= 2 * MAX_ROWS || this.whole ? rows : [...rows.slice(0, MAX_ROWS), null, ...rows.slice(-MAX_ROWS)];
    const known = rows.filter((row) => row.reward !== null), mean = known.reduce((sum, row) => sum + row.reward, 0) / known.length;
    fill(this.samples,
      h("div.samples-head", null, h("b", null, "rollouts"), h("span.spread"),
        h("button.small", { type: "button", onclick: () => move(-1), disabled: at <= 0, "aria-label": "earlier step" }, "←"),
        h("select", { "aria-label": "step", onchange: (event) => this.showStep(Number(event.target.value)) }, kept.map((each) => h("option", { value: String(each), selected: each === step }, `step ${each}`))),
        h("button.small", { type: "button", onclick: () => move(1), disabled: at >= kept.length - 1, "aria-label": "later step" }, "→"),
        h("span.quiet", null, `${many(rows.length, "rollout")}${known.length ? `, mean reward ${number(mean)}` : ""}, best first`)),
      problems.map((text) => h("p.problem", null, text)),
      h("div.rollouts", null, shown.map((row) => (row ? sampleRow(row) : h("button.unfold", { type: "button", onclick: () => {
        this.whole = true;
        this.drawSamples({ step, rows, problems, depths });
      } }, `${many(rows.length - 2 * MAX_ROWS, "rollout")} between the best and the worst`)))),
      h("div.scroll-x", null, h("table.depths", null, h("thead", null, h("tr", null, ["depth", "calls", "reward", "turns", "tokens", "surprise", "cut"].map((name, index) => h("th", { class: index ? "num" : "" }, name)))),
        h("tbody", null, depths.map((each) => h("tr", null, h("td", null, `${each.depth} ${each.kind}`),
          [number(each.calls), brief(each.reward), brief(each.turns), count(each.sampled), brief(each.surprise), `${Math.round(100 * each.truncated)}%`].map((text) => h("td.num", null, text))))))));
    this.samples.hidden = false;
  }

  keys() {
    const kept = this.data.kept, at = kept.indexOf(this.step), move = (by) => kept[at + by] !== undefined && this.showStep(kept[at + by]);
    return { "]": ["rollouts of a later step", () => move(1)], "[": ["rollouts of an earlier step", () => move(-1)], "/": ["filter curves", () => this.filter.focus()] };
  }
}

function byImportance(a, b) {
  const first = ["reward", "validation/reward", "child_reward", "loss"], rank = (name) => (first.indexOf(name) + 1 || 99);
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}

function sampleRow(row) {
  const [words, tone] = stopWords(row.stop);
  return h("a.rollout", { href: runAddress(row.key) }, h("b.num", null, number(row.reward)),
    h("span.asked", null, oneLine(row.question, 160) || row.id),
    h("span.came", { class: row.answer ? "" : "bad" }, oneLine(row.answer || row.error || "no answer", 160)),
    h("span.quiet", null, h("span", { class: `mark ${tone}` }, words), ` · ${many(row.num_calls, "call")} · ${count(row.tokens)} tokens`));
}

function brief(value) {
  return value === null ? "–" : String(Number(value.toPrecision(2)));
}
