// What leaves the training page (share.js): the verdict, the alarms, the charts in sight, the last
// values and the options; and all metrics as a table.

import { number } from "./format.js";

const MARGIN = 16; // pixels around a chart of the picture
const TITLE = 24; // pixels of its name

// view: the training page, with its runs, charts and verdict
/** @returns {import("./share.js").Shared} */
export function sharedTraining({ data, runs, charts }) {
  const { name, verdict, alarms, names, config } = data;
  return {
    name: name || "training",
    title: name || "Training",
    parts: [
      { text: verdict.map((fact) => fact.text).join("; ") },
      ...alarms.map((alarm) => ({ text: `${alarm.name.replaceAll("_", " ")}: ${alarm.text}` })),
      ...(charts.size ? [{ canvas: pictureOfCharts(charts) }] : []),
      { heading: "Last values" },
      {
        table: {
          head: ["metric", "value"],
          rows: Object.entries(names).map(([each, [, values]]) => [each, number(values.at(-1))]),
        },
      },
      ...(Object.keys(config).length
        ? [
            { heading: "Options" },
            { table: { head: ["option", "value"], rows: Object.entries(config) } },
          ]
        : []),
    ],
    csv: metricsTable(runs),
  };
}

// One row for each step of each run.
export function metricsTable(runs) {
  const names = [...new Set(runs.flatMap(({ data }) => Object.keys(data.names)))].sort(),
    rows = [];
  for (const { key, data } of runs) {
    const { clock } = data,
      at = new Map(clock.steps.map((step, index) => [step, index]));
    const columns = names.map((name) => {
      const [steps, values] = data.names[name] ?? [[], []];
      return new Map(steps.map((step, index) => [step, values[index]]));
    });
    const steps = [...new Set(Object.values(data.names).flatMap(([own]) => own))];
    for (const step of steps.sort((a, b) => a - b)) {
      const index = at.get(step);
      rows.push([
        key,
        step,
        clock.seconds[index] ?? "",
        clock.tokens[index] ?? "",
        ...columns.map((column) => column.get(step) ?? ""),
      ]);
    }
  }
  return { head: ["run", "step", "seconds", "tokens", ...names], rows };
}

// All charts in sight on one canvas, two in a row.
function pictureOfCharts(shown) {
  const charts = [...shown.values()],
    dot = devicePixelRatio,
    canvases = charts.map((chart) => chart.plot.holder.querySelector("canvas")),
    wide = Math.max(...canvases.map((each) => each.width)) + 2 * MARGIN * dot,
    high = Math.max(...canvases.map((each) => each.height)) + (TITLE + MARGIN) * dot,
    canvas = document.createElement("canvas"),
    style = getComputedStyle(document.documentElement);
  canvas.width = wide * Math.min(2, charts.length);
  canvas.height = high * Math.ceil(charts.length / 2);
  const pen = canvas.getContext("2d");
  pen.fillStyle = style.getPropertyValue("--paper");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = style.getPropertyValue("--ink");
  pen.font = `600 ${13 * dot}px system-ui`;
  for (const [index, chart] of charts.entries()) {
    const x = (index % 2) * wide + MARGIN * dot,
      y = Math.floor(index / 2) * high;
    const title = `${chart.name}  ${chart.latest.textContent}`;
    pen.fillText(title, x, y + 16 * dot, wide - 8 * dot);
    pen.drawImage(canvases[index], x, y + TITLE * dot);
  }
  return canvas;
}
