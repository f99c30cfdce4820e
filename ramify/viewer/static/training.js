// Training page: the verdict on a run, its pinned charts, the others on demand, further runs beside
// it, and saved rollouts. What is drawn is chosen in curves.js; a plot is drawn in plots.js.
//
// The address names the runs and, in its last part, how they are shown: view=x:tokens;log;smooth:0.6

import { follow, get } from "./api.js";
import {
  bandOfSeeds,
  chartsOf,
  constantsOf,
  differingOptions,
  inGroups,
  inStage,
  pinnedOf,
  pointsOf,
  seedGroups,
  withChanges,
} from "./curves.js";
import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { many, number, seconds } from "./format.js";
import { TrainingPlot } from "./plots.js";
import { showNothing } from "./records.js";
import { listPlaces } from "./run_list.js";
import { Samples } from "./samples.js";
import { sharedTraining } from "./shared_training.js";
import { table } from "./table.js";

// Curves have a name and nothing else to filter by.
/** @type {import("./filter.js").Fields} */
const CURVE_FIELDS = {
  numbers: {},
  texts: { name: (chart) => chart },
  words: (chart) => chart,
};
const RUN_COLOURS = ["--series-1", "--series-4", "--series-3", "--series-2", "--live", "--bad"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const OTHERS_MS = 10_000; // between two looks at the runs beside the first, which is followed
const UNITS = { step: "step", seconds: "time", tokens: "tokens" };

export async function trainingPage(page, keys) {
  const { trainings } = await listPlaces();
  document.title = "Training · Ramify";
  if (!trainings.length) {
    const missing = "The given paths contain no training runs.";
    showNothing(page, "Training", missing, "Show one with", "ramify view runs/mine");
    return null;
  }
  const wanted = keys.filter((key) => !key.startsWith("view=")),
    own = [...new Set(wanted.length ? wanted : [trainings[0].key])],
    view = new TrainingView(
      trainings,
      own,
      readSettings(keys.find((key) => key.startsWith("view="))),
    );
  await view.start(page);
  return view;
}

// How the curves are shown, from the address.
function readSettings(part) {
  const parts = (part ?? "").slice("view=".length).split(";"),
    settingOf = (name) => parts.find((each) => each.startsWith(`${name}:`))?.slice(name.length + 1);
  const unit = settingOf("x"),
    weight = Number(settingOf("smooth"));
  return {
    unit: Object.hasOwn(UNITS, unit ?? "") ? unit : "step",
    smoothing: weight > 0 && weight < 1 ? weight : 0,
    isLog: parts.includes("log"),
    isGrouped: !parts.includes("apart"),
    stage: settingOf("stage") ?? null, // null: the last one; "all" for all of them
  };
}

class TrainingView {
  constructor(trainings, keys, settings) {
    this.trainings = trainings;
    this.chosen = keys;
    this.settings = settings;
    this.charts = new Map(); // chart -> { element, latest, plot, lines }
  }

  async start(page) {
    this.link = h("link", { rel: "stylesheet", href: "/static/vendor/uplot.css" });
    document.head.append(this.link);
    this.runs = await Promise.all(
      this.chosen.map(async (key) => ({ key, data: await get("/api/training", { key }) })),
    );
    this.filter = new FilterInput(CURVE_FIELDS, {
      label: "filter curves",
      placeholder: "filter curves",
      changed: () => this.draw(),
      id: "filter",
    });
    this.standing = h("span.quiet");
    this.problems = h("div.problems");
    this.sentence = h("ul.verdict", { "aria-label": "verdict" });
    this.alarms = h("div.problems", { role: "group", "aria-label": "alarms" });
    this.stages = h("select", {
      "aria-label": "stage",
      onchange: () => this.set({ stage: this.stages.value }),
    });
    this.samples = new Samples(this.chosen[0], this.data.kept);
    this.pinned = h("div.charts.pinned", { role: "group", "aria-label": "pinned charts" });
    this.differences = h("section.differences", { "aria-label": "differing options" });
    this.constants = h("p.constants.quiet");
    this.rest = h("div.charts");
    this.restName = h("summary");
    this.fold = h("details.rest", { ontoggle: () => this.draw() }, this.restName, this.rest);
    fill(
      page,
      h(
        "div.wide.training",
        null,
        h(
          "div.wide-head",
          null,
          h("h1", null, "Training"),
          this.runChoice(),
          this.standing,
          this.filter.fix,
        ),
        this.problems,
        this.sentence,
        this.alarms,
        this.controls(),
        h("div.beside", null, h("div", null, this.pinned, this.differences), this.samples.element),
        this.constants,
        this.fold,
      ),
    );
    this.resize = new ResizeObserver(() => this.size());
    this.resize.observe(this.pinned);
    this.draw();
    if (this.data.kept.length) this.samples.showStep(this.data.kept.at(-1));
    this.stop = follow(
      "/api/training/events",
      { key: this.chosen[0] },
      () => this.data.version ?? 0,
      (data) => this.take(data),
    );
    this.others = setInterval(() => this.lookAtOthers(), OTHERS_MS);
    this.recolour = () => this.again();
    addEventListener("ramify-theme", this.recolour);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.recolour);
  }

  close() {
    this.stop();
    clearInterval(this.others);
    this.resize.disconnect();
    removeEventListener("ramify-theme", this.recolour);
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.recolour);
    for (const chart of this.charts.values()) chart.plot.destroy();
    this.link.remove();
  }

  // What the first run has measured: the verdict, the stages and the rollouts are its own.
  get data() {
    return this.runs[0].data;
  }

  async take(message) {
    const [key] = this.chosen,
      data =
        withChanges(this.data, message) ?? (await get("/api/training", { key }).catch(() => null));
    if (!data) return; // the next message asks again
    const isLast = this.samples.step === this.data.kept.at(-1),
      newest = data.kept.at(-1);
    this.runs[0] = { key, data };
    this.samples.kept = data.kept;
    this.draw();
    if (isLast && newest !== this.samples.step) this.samples.showStep(newest);
  }

  // A browser has few connections to a server, so only the first run is followed.
  async lookAtOthers() {
    for (const run of this.runs.slice(1)) {
      const known = run.data.version,
        news = await get("/api/training", { key: run.key, version: known }).catch(() => null);
      if (!news?.names) continue; // nothing new, or no answer
      run.data = withChanges(run.data, news);
      this.draw();
    }
  }

  shared() {
    return sharedTraining(this);
  }

  nameOf(key) {
    const row = this.trainings.find((each) => each.key === key);
    if (!row) return key;
    const same = this.trainings.filter((other) => other.name === row.name).length > 1;
    return same ? row.folder : row.name;
  }

  // --- what is chosen ----------------------------------------------------------------------------

  address(keys = this.chosen) {
    const { unit, smoothing, isLog, isGrouped, stage } = this.settings;
    const parts = [
      unit === "step" ? "" : `x:${unit}`,
      smoothing ? `smooth:${smoothing}` : "",
      isLog ? "log" : "",
      isGrouped ? "" : "apart",
      stage ? `stage:${stage}` : "",
    ].filter(Boolean);
    const all = parts.length ? [...keys, `view=${parts.join(";")}`] : keys;
    return `#/training/${all.map(encodeURIComponent).join("/")}`;
  }

  set(changed) {
    Object.assign(this.settings, changed);
    history.replaceState(null, "", this.address());
    this.draw();
  }

  runChoice() {
    const { trainings, chosen: keys } = this,
      go = (wanted) => {
        location.hash = this.address([...new Set(wanted)]);
      };
    const option = (each) =>
      h("option", { value: each.key, selected: each.key === keys[0] }, this.nameOf(each.key));
    const choose = h(
      "select",
      {
        "aria-label": "training run",
        onchange: () => go([choose.value, ...keys.slice(1)]),
      },
      trainings.map(option),
    );
    const left = trainings.filter((each) => !keys.includes(each.key));
    const add = h(
      "select",
      { "aria-label": "add a run", onchange: () => go([...keys, add.value]) },
      h("option", { value: "" }, "add a run"),
      left.map((each) => h("option", { value: each.key }, this.nameOf(each.key))),
    );
    return h(
      "div.choose",
      null,
      choose,
      keys.slice(1).map((key) =>
        h(
          "button.small",
          {
            type: "button",
            "aria-label": `remove ${this.nameOf(key)}`,
            onclick: () => go(keys.filter((each) => each !== key)),
          },
          `${this.nameOf(key)} ×`,
        ),
      ),
      left.length ? add : null,
      left.length > 1
        ? h(
            "button.small",
            {
              type: "button",
              onclick: () => go([...keys, ...left.map((each) => each.key)]),
            },
            `all ${trainings.length}`,
          )
        : null,
    );
  }

  controls() {
    const { unit, smoothing, isLog, isGrouped } = this.settings;
    const units = h(
      "select",
      { "aria-label": "horizontal axis", onchange: () => this.set({ unit: units.value }) },
      Object.entries(UNITS).map(([value, words]) =>
        h("option", { value, selected: value === unit }, `x: ${words}`),
      ),
    );
    const weight = h("input", {
      type: "range",
      min: "0",
      max: "0.95",
      step: "0.05",
      value: String(smoothing),
      oninput: () => this.set({ smoothing: Number(weight.value) }),
    });
    const tick = (words, isOn, changed) => {
      const box = h("input", {
        type: "checkbox",
        checked: isOn,
        onchange: () => this.set(changed(box.checked)),
      });
      return h("label", null, box, words);
    };
    return h(
      "div.controls",
      { role: "group", "aria-label": "how curves are shown" },
      this.stages,
      units,
      h("label", null, "smoothing", weight),
      tick("log scale", isLog, (isOn) => ({ isLog: isOn })),
      this.runs.length > 1
        ? tick("merge seeds into a band", isGrouped, (isOn) => ({ isGrouped: isOn }))
        : null,
      h("span.spread"),
      this.filter.input,
    );
  }

  // --- the verdict -------------------------------------------------------------------------------

  drawVerdict() {
    const { step, at_s, verdict, alarms, num_compared } = this.data;
    this.standing.textContent = `step ${number(step)} · ${seconds(at_s)}`;
    fill(
      this.problems,
      this.runs
        .flatMap(({ data }) => data.problems)
        .map((text) => h("p.problem", { role: "alert" }, text)),
    );
    const means = `means of the first ${many(num_compared, "step")} and the last ${num_compared}`;
    fill(
      this.sentence,
      verdict.map((fact) =>
        h("li", { class: fact.tone, title: num_compared > 1 ? means : null }, fact.text),
      ),
    );
    fill(
      this.alarms,
      alarms.map(({ name, text, action, steps, ceased }) =>
        h(
          "p.problem",
          { role: "alert", class: ceased === null ? "" : "past" },
          h("b", null, name.replaceAll("_", " ")),
          ` ${text} `,
          h(
            "span.quiet",
            null,
            steps.length > 1
              ? `raised ${number(steps.length)} times, last at step ${number(steps.at(-1))}`
              : `raised at step ${number(steps[0])}`,
            ceased === null ? "" : `, cleared at step ${number(ceased)}`,
            action === "warn" ? "" : `; action: ${action}`,
          ),
        ),
      ),
    );
  }

  // --- curves ------------------------------------------------------------------------------------

  get stage() {
    const { stages } = this.data,
      { stage } = this.settings;
    if (stage === "all" || stages.length < 2) return null;
    return stages.some(([name]) => name === stage) ? stage : stages.at(-1)[0];
  }

  drawStages() {
    const { stages } = this.data,
      options = [...stages.map(([name]) => name), "all"];
    this.stages.hidden = stages.length < 2;
    fill(
      this.stages,
      options.map((name) =>
        h(
          "option",
          { value: name, selected: name === (this.stage ?? "all") },
          name === "all" ? "all stages" : `stage: ${name}`,
        ),
      ),
    );
  }

  draw() {
    this.drawVerdict();
    this.drawStages();
    const stage = this.stage;
    this.shown = this.runs.map((run, index) => ({
      ...run,
      curves: inStage(run.data, stage),
      name: this.nameOf(run.key),
      colour: RUN_COLOURS[index % RUN_COLOURS.length],
    }));
    this.groups = this.settings.isGrouped
      ? seedGroups(this.shown)
      : this.shown.map((each) => [each]);
    const names = [...new Set(this.shown.flatMap((run) => Object.keys(run.curves)))],
      pinned = pinnedOf(names),
      inPinned = new Set([...pinned.values()].flatMap((lines) => lines.map(({ name }) => name))),
      constants = constantsOf(this.shown.map((run) => run.curves)),
      charts = chartsOf(names.filter((name) => !constants.has(name) && !inPinned.has(name)));
    const { matches, order, narrows, problem } = this.filter,
      isFiltered = narrows || Boolean(problem);
    const chosen = [...pinned].filter(([chart, lines]) =>
      [chart, ...lines.map((line) => line.name)].some(matches),
    );
    // A chart on which an alarm was raised is not folded away.
    const alarmed = [...charts.keys()].filter((chart) =>
      charts.get(chart).some((line) => this.alarmsOf(this.data, line.name).length),
    );
    const open = [...chosen, ...alarmed.filter(matches).map((name) => [name, charts.get(name)])],
      folded = [...charts.keys()].filter((chart) => matches(chart) && !alarmed.includes(chart));
    if (order) {
      open.sort(([a], [b]) => order(a, b));
      folded.sort(order);
    }
    if (isFiltered && folded.length) this.fold.open = true;
    const isOpen = this.fold.open,
      groups = !isOpen ? [] : order ? [["", folded]] : inGroups(folded);
    const all = new Map(
      /** @type {[string, import("./curves.js").Line[]][]} */ ([
        ...open,
        ...(isOpen ? folded.map((name) => [name, charts.get(name)]) : []),
      ]),
    );
    const signature = JSON.stringify([open.map(([name]) => name), groups, isFiltered]);
    if (signature !== this.signature) this.arrange(signature, open, groups, all, names.length);
    this.fold.hidden = !folded.length;
    fill(
      this.restName,
      `${many(folded.length, "other curve")}${isFiltered ? " matching the filter" : ""}`,
    );
    const still = [...constants].filter(([name]) => !inPinned.has(name) && matches(name));
    fill(
      this.constants,
      still.length
        ? ["constant: ", still.map(([name, value]) => `${name} ${number(value)}`).join(" · ")]
        : null,
    );
    this.drawDifferences();
    for (const [name, lines] of all) this.drawChart(this.charts.get(name), lines);
    this.size();
  }

  arrange(signature, open, groups, all, numMeasured) {
    this.signature = signature;
    for (const [name, chart] of this.charts)
      if (!all.has(name)) {
        chart.plot.destroy();
        this.charts.delete(name);
      }
    const made = (name) => this.chart(name).element;
    const missing = numMeasured ? "no curve matches the filter" : "no metrics yet";
    fill(
      this.pinned,
      h("h2.offscreen", null, "Pinned charts"),
      open.map(([name]) => made(name)),
      all.size || (numMeasured && !this.filter.text) ? null : h("p.quiet", null, missing),
    );
    fill(
      this.rest,
      groups.map(([title, members]) => [
        title ? h("h2.group-title", null, title) : null,
        members.map(made),
      ]),
    );
  }

  chart(name) {
    if (this.charts.has(name)) return this.charts.get(name);
    const latest = h("span.latest");
    const chart = {
      name,
      latest,
      lines: [],
      plot: new TrainingPlot(name, {
        picked: (at, data) => this.say(chart, at, data),
        clicked: (place) => this.samples.showNear(this.stepAt(place)),
      }),
    };
    chart.element = h(
      "section.chart",
      { "aria-label": name, "data-name": name },
      h("h3", null, name, latest),
      chart.plot.holder,
    );
    this.charts.set(name, chart);
    return chart;
  }

  // One line for each metric of each run, or of each group of seeds.
  drawChart(chart, lines) {
    const { unit, isLog } = this.settings,
      isOne = this.groups.length === 1;
    chart.lines = this.groups.flatMap((members, index) =>
      lines
        .map((line, at) => ({
          words: lines.length > 1 ? line.label : "",
          colour: isOne ? line.colour : RUN_COLOURS[index % RUN_COLOURS.length],
          dash: isOne ? [] : DASHES[at % DASHES.length],
          isRight: !!line.isRight,
          points: this.pointsOf(members, line.name),
        }))
        .filter((line) => line.points.x.length)
        .map(({ words, ...line }, at) => ({
          ...line,
          label: [isOne || at ? "" : this.groupName(members), words].filter(Boolean).join(" "),
        })),
    );
    const marks = lines.flatMap((line) => this.marksOn(line, chart.name));
    chart.element.dataset.alarms = [...new Set(marks.map((mark) => mark.words))].join(", ");
    chart.plot.draw({
      lines: chart.lines,
      marks,
      stages: this.stage
        ? []
        : this.data.stages.slice(1).map(([name, step]) => [name, this.placeOf(this.data, step)]),
      unit,
      isLog,
    });
    this.say(chart, null, null);
  }

  pointsOf(members, metric) {
    const { settings } = this;
    const each = members.map(({ curves, data }) => ({
      steps: curves[metric]?.[0] ?? [],
      points: pointsOf(curves, data.clock, metric, settings),
    }));
    return each.length === 1 ? each[0].points : bandOfSeeds(each);
  }

  groupName(members) {
    return members.length === 1
      ? members[0].name
      : `${members[0].name} and ${many(members.length - 1, "other seed")}`;
  }

  alarmsOf(data, metric) {
    return data.alarms.filter((alarm) => alarm.metrics.includes(metric));
  }

  // Where alarms were raised: on the curves that show them, and all of them on the reward's.
  marksOn({ name: metric, isRight = false }, chart) {
    return this.shown.flatMap(({ data, curves }) => {
      const own = curves[metric];
      if (!own) return [];
      const found = chart === "reward" ? data.alarms : this.alarmsOf(data, metric);
      return found.flatMap((alarm) =>
        alarm.steps
          .filter((step) => !this.stage || step >= own[0][0])
          .map((step) => ({
            words: alarm.name.replaceAll("_", " "),
            x: this.placeOf(data, step),
            y: own[1][own[0].indexOf(step)] ?? null,
            isRight,
          })),
      );
    });
  }

  // Between steps and places on the horizontal axis of the first run.
  placeOf({ clock }, step) {
    const { unit } = this.settings;
    return unit === "step" ? step : (clock[unit][clock.steps.indexOf(step)] ?? 0);
  }

  stepAt(place) {
    const { unit } = this.settings,
      { clock } = this.data;
    if (unit === "step") return place;
    const at = clock[unit].findIndex((each) => each >= place);
    return clock.steps.at(at);
  }

  // The values under the pointer, else the latest ones.
  say(chart, at, data) {
    const { lines } = chart,
      { unit } = this.settings,
      write = { step: (x) => `step ${number(x)}`, seconds, tokens: (x) => `${number(x)} tokens` };
    const values = lines.map(({ points }, index) =>
      at === null ? (points.y.at(-1) ?? null) : (data[index + 1][at] ?? null),
    );
    fill(
      chart.latest,
      at === null ? "" : `${write[unit](data[0][at])}: `,
      lines.map((line, index) => [
        index ? " · " : "",
        lines.length > 1 ? h("i.line-key", { style: { background: `var(${line.colour})` } }) : "",
        line.label ? `${line.label} ` : "",
        number(values[index]),
      ]),
    );
  }

  drawDifferences() {
    const rows = differingOptions(this.runs.map((run) => run.data.config)),
      isKnown = this.runs.every((run) => Object.keys(run.data.config).length);
    this.differences.hidden = this.runs.length < 2;
    if (this.differences.hidden) return;
    const columns = [
      { name: "option", isHead: true, cell: ([name]) => name },
      ...this.shown.map((run, index) => ({
        name: run.name,
        cell: ([, values]) => values[index],
        tone: ([, values]) => (index && values[index] !== values[0] ? "odd" : ""),
      })),
    ];
    fill(
      this.differences,
      h("h2", null, "Differing options"),
      isKnown ? null : h("p.quiet", null, "Options are known only for runs with a checkpoint."),
      rows.length
        ? h(
            "div.scroll-x",
            { tabindex: "0", role: "group", "aria-label": "options" },
            table("table.figures", columns, rows),
          )
        : h("p.quiet", null, "All known options are the same."),
    );
  }

  size() {
    for (const chart of this.charts.values()) chart.plot.size();
  }

  // Colours are fixed in a plot, so another theme makes all of them again.
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
