// Training page: a curve over the steps for each metric, an optional second run, and saved
// rollouts.

import { follow, get } from "./api.js";
import { aligned, chartsOf, inGroups } from "./curves.js";
import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { count, number, seconds } from "./format.js";
import { showNothing } from "./records.js";
import { Samples } from "./samples.js";
import uPlot from "./vendor/uplot.js";

// Curves have a name and nothing else to filter by.
/** @type {import("./filter.js").Fields} */
const CURVE_FIELDS = {
  numbers: {},
  texts: { name: (chart) => chart },
  words: (chart) => chart,
};

export async function trainingPage(page, keys) {
  const { trainings } = await get("/api/runs");
  document.title = "Training · Ramify";
  if (!trainings.length) {
    const missing = "The given paths contain no folder of ramify train.";
    showNothing(page, "Training", missing, "Show one with", "ramify view runs/mine");
    return null;
  }
  const view = new TrainingView(trainings, keys[0] || trainings[0].key, keys[1] || "");
  await view.start(page);
  return view;
}

class TrainingView {
  constructor(trainings, key, other) {
    this.trainings = trainings;
    this.key = key;
    this.otherKey = other === key ? "" : other;
    this.charts = new Map(); // chart -> { element, plot, holder, latest, lines }
  }

  async start(page) {
    this.link = h("link", { rel: "stylesheet", href: "/static/vendor/uplot.css" });
    document.head.append(this.link);
    this.data = await get("/api/training", { key: this.key });
    this.other = this.otherKey ? await get("/api/training", { key: this.otherKey }) : null;
    const option = (each, chosen) =>
      h("option", { value: each.key, selected: each.key === chosen }, this.nameOf(each));
    const choose = h(
      "select",
      { "aria-label": "training run", onchange: () => this.go(choose.value, this.otherKey) },
      this.trainings.map((each) => option(each, this.key)),
    );
    const overlay = h(
      "select",
      { "aria-label": "laid over it", onchange: () => this.go(this.key, overlay.value) },
      h("option", { value: "" }, "overlay: none"),
      this.trainings
        .filter((each) => each.key !== this.key)
        .map((each) => option(each, this.otherKey)),
    );
    this.filter = new FilterInput(CURVE_FIELDS, {
      label: "filter curves",
      placeholder: "filter curves",
      changed: () => this.draw(),
      id: "filter",
    });
    this.standing = h("span.quiet");
    this.problems = h("div.problems");
    this.diagnoses = h("div.problems", { role: "group", "aria-label": "diagnoses" });
    this.tiles = h("dl.tiles");
    this.samples = new Samples(this.key, this.data.kept);
    this.grid = h("div.charts");
    fill(
      page,
      h(
        "div.wide",
        null,
        h(
          "div.wide-head",
          null,
          h("h1", null, "Training"),
          h(
            "div.choose",
            null,
            choose,
            this.trainings.length > 1 ? overlay : null,
            this.filter.input,
          ),
          this.standing,
          this.filter.fix,
        ),
        this.problems,
        this.diagnoses,
        this.tiles,
        h("div.beside", null, this.grid, this.samples.element),
      ),
    );
    this.draw();
    if (this.data.kept.length) this.samples.showStep(this.data.kept[this.data.kept.length - 1]);
    this.stop = follow(
      "/api/training/events",
      { key: this.key },
      () => this.data.version ?? 0,
      (data) => {
        const isLast = this.samples.step === this.data.kept.at(-1),
          newest = data.kept.at(-1);
        this.data = { ...data };
        this.samples.kept = data.kept;
        this.draw();
        if (isLast && newest !== this.samples.step) this.samples.showStep(newest);
      },
    );
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

  // --- curves ------------------------------------------------------------------------------------

  draw() {
    const data = this.data,
      stages = data.stages.map(([name, step]) => `${name} from ${step}`).join(", ");
    this.standing.textContent = `step ${number(data.step)} · ${seconds(data.at_s)}${stages ? ` · ${stages}` : ""}`;
    fill(
      this.problems,
      [...data.problems, ...(this.other ? this.other.problems : [])].map((text) =>
        h("p.problem", { role: "alert" }, text),
      ),
    );
    // The newest first: a run that goes wrong repeats itself.
    fill(
      this.diagnoses,
      [...(data.diagnoses || [])]
        .reverse()
        .map(({ step, name, text, action }) =>
          h(
            "p.problem",
            { role: "alert" },
            h("b", null, `step ${number(step)} · ${name.replaceAll("_", " ")}`),
            ` ${text}${action === "warn" ? "" : ` (${action})`}`,
          ),
        ),
    );
    this.drawTiles();
    const all = chartsOf(Object.keys(data.names));
    const wanted = [...all.keys()].filter(this.filter.matches),
      order = inGroups(wanted);
    const signature = JSON.stringify(
      order.map(([, charts]) =>
        charts.map((chart) => [chart, all.get(chart).map((line) => line.name)]),
      ),
    );
    if (signature !== this.signature) {
      this.signature = signature;
      for (const [name, chart] of this.charts) {
        if (!wanted.includes(name) || chart.lines.length !== all.get(name).length) {
          chart.plot.destroy();
          this.charts.delete(name);
        }
      }
      fill(
        this.grid,
        order.map(([title, members]) => [
          h("h2.group-title", null, title),
          members.map((name) => this.chart(name, all.get(name)).element),
        ]),
      );
      if (!order.length)
        fill(
          this.grid,
          h("p.quiet", null, all.size ? "no curve of that name" : "nothing was measured yet"),
        );
      this.size();
    }
    for (const chart of this.charts.values()) {
      chart.plot.setData(this.values(chart.lines));
      this.sayLatest(chart);
    }
  }

  drawTiles() {
    const found = [],
      last = (name) => this.data.names[name]?.[1].at(-1);
    for (const name of ["reward", "validation/reward"])
      if (last(name) !== undefined) found.push([`${name} now`, number(last(name))]);
    for (const { stage, values } of this.data.final)
      for (const [name, value] of Object.entries(values))
        if (/reward$|pass/.test(name)) found.push([`${stage}: ${name}`, number(value)]);
    if (last("tokens_per_s") !== undefined)
      found.push(["tokens per second", count(last("tokens_per_s"))]);
    fill(
      this.tiles,
      found.map(([name, value]) => h("div.tile", null, h("dt", null, name), h("dd", null, value))),
    );
    this.tiles.hidden = !found.length;
  }

  // The lines of this run, then those of the other run.
  values(lines) {
    const of = (data) => lines.map(({ name }) => data.names[name]);
    return aligned([...of(this.data), ...(this.other ? of(this.other) : [])]);
  }

  chart(name, lines) {
    if (this.charts.has(name)) return this.charts.get(name);
    const latest = h("span"),
      holder = h("div.plot");
    const element = h(
      "section.chart",
      { "aria-label": name, "data-name": name },
      h("h3", null, name, latest),
      holder,
    );
    const chart = { element, holder, latest, lines };
    chart.plot = this.plot(chart);
    this.charts.set(name, chart);
    return chart;
  }

  plot(chart) {
    const style = getComputedStyle(document.documentElement),
      colour = (each) => style.getPropertyValue(each).trim();
    const axis = {
      stroke: colour("--ink-3"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "11px system-ui",
    };
    const data = this.values(chart.lines),
      few = data[0].length < 60,
      several = chart.lines.length > 1;
    const series = [
      { label: "step" },
      ...chart.lines.map((line) => ({
        label: line.name,
        stroke: colour(line.colour),
        width: 1.6,
        spanGaps: true,
        points: { show: few, size: 4 },
      })),
    ];
    if (this.other)
      series.push(
        ...chart.lines.map((line) => ({
          label: line.name,
          stroke: colour(several ? line.colour : "--warn"),
          width: 1.6,
          dash: [5, 3],
          spanGaps: true,
          points: { show: false },
        })),
      );
    const plot = new uPlot(
      {
        width: Math.max(chart.holder.clientWidth, 300),
        height: 180,
        series,
        scales: { x: { time: false } },
        legend: { show: false },
        padding: [8, 10, 0, 0],
        axes: [
          { ...axis, size: 26 },
          {
            ...axis,
            size: 58,
            values: (_, ticks) => ticks.map((each) => (each === null ? "" : number(each))),
          },
        ],
        cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "training" } },
        hooks: {
          setCursor: [(self) => this.said(self, chart)],
          draw: [(self) => this.drawStages(self, colour("--line-2"), colour("--ink-3"))],
        },
      },
      data,
      chart.holder,
    );
    plot.over.addEventListener(
      "click",
      () =>
        plot.cursor.idx !== null &&
        plot.cursor.idx !== undefined &&
        this.samples.showNear(plot.data[0][plot.cursor.idx]),
    );
    return plot;
  }

  // The values under the pointer replace the latest ones.
  said(plot, chart) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) return this.sayLatest(chart);
    this.say(
      chart,
      `step ${number(plot.data[0][at])}: `,
      plot.data.slice(1).map((each) => each[at] ?? null),
    );
  }

  sayLatest(chart) {
    const of = (data) => chart.lines.map(({ name }) => data.names[name]?.[1].at(-1) ?? null);
    this.say(chart, "", [...of(this.data), ...(this.other ? of(this.other) : [])]);
  }

  say(chart, before, values) {
    const lines = chart.lines,
      several = lines.length > 1;
    fill(
      chart.latest,
      before,
      values.map((value, index) => [
        index ? " · " : "",
        several && index < lines.length
          ? h("i.line-key", { style: { background: `var(${lines[index].colour})` } })
          : "",
        several && index < lines.length ? `${lines[index].label} ` : "",
        number(value),
      ]),
    );
  }

  drawStages(plot, line, ink) {
    const pen = plot.ctx,
      { left, top, width, height } = plot.bbox;
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

  size() {
    for (const chart of this.charts.values()) {
      const width = chart.holder.clientWidth;
      if (width && Math.abs(width - chart.plot.width) > 1)
        chart.plot.setSize({ width, height: 180 });
    }
  }

  again() {
    for (const chart of this.charts.values()) chart.plot.destroy();
    this.charts.clear();
    this.signature = "";
    this.draw();
  }

  keys() {
    return {
      "]": ["rollouts of a later step", () => this.samples.move(1)],
      "[": ["rollouts of an earlier step", () => this.samples.move(-1)],
      "/": ["filter curves", () => this.filter.focus()],
    };
  }
}
