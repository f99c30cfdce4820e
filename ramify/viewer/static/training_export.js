// What leaves the training page: the metrics as CSV, the charts in sight as PNG, and both with the
// verdict as one HTML file that works offline.

import { fill, h, toast } from "./dom.js";
import { number } from "./format.js";

const MARGIN = 16; // pixels around a chart of the picture
const TITLE = 24; // pixels of its name
// The head of the HTML file: it may load nothing and run nothing.
const HEAD =
  '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; ' +
  "img-src data:; style-src 'unsafe-inline'\"><style>" +
  "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px}" +
  "img{max-width:100%}table{border-collapse:collapse}" +
  "td,th{text-align:left;padding:2px 14px 2px 0;overflow-wrap:anywhere}</style>";

// view: the training page, with its runs, charts and verdict
export function exportButtons(view) {
  const name = () => view.data.name || "training";
  const button = (words, title, work) =>
    h("button.small", { type: "button", title, onclick: work }, words);
  return h(
    "span.exports",
    { role: "group", "aria-label": "export" },
    button("CSV", "all metrics of these runs", () =>
      save(`${name()}.csv`, "text/csv", metricsAsCsv(view.runs)),
    ),
    button("PNG", "the charts in sight", () => {
      if (!view.charts.size) toast("no chart is in sight");
      else pictureOf(view).toBlob((blob) => save(`${name()}.png`, "image/png", blob));
    }),
    button("HTML", "verdict, charts and last values in one file", () =>
      save(`${name()}.html`, "text/html", reportOf(view)),
    ),
  );
}

function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type })),
    link = h("a", { download: name });
  link.href = address;
  link.click();
  URL.revokeObjectURL(address);
  toast(`${name} saved`);
}

// One row for each step of each run.
export function metricsAsCsv(runs) {
  const names = [...new Set(runs.flatMap(({ data }) => Object.keys(data.names)))].sort(),
    rows = [["run", "step", "seconds", "tokens", ...names]];
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
  return `${rows.map((row) => row.map(csvCell).join(",")).join("\r\n")}\r\n`;
}

// A spreadsheet would run a text that begins like a formula.
function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// All charts in sight on one canvas, two in a row.
function pictureOf(view) {
  const charts = [...view.charts.values()],
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
    pen.fillText(chart.element.querySelector("h3").textContent, x, y + 16 * dot, wide - 8 * dot);
    pen.drawImage(canvases[index], x, y + TITLE * dot);
  }
  return canvas;
}

function reportOf(view) {
  const file = document.implementation.createHTMLDocument(view.data.name);
  const { verdict, alarms, names, config } = view.data;
  const rowsOf = (pairs) =>
    h(
      "table",
      null,
      pairs.map(([name, value]) =>
        h("tr", null, h("th", { scope: "row" }, name), h("td", null, value)),
      ),
    );
  fill(
    file.body,
    h("h1", null, view.data.name),
    h("p", null, verdict.map((fact) => fact.text).join("; ")),
    alarms.map(({ name, text }) =>
      h("p", null, h("b", null, name.replaceAll("_", " ")), ` ${text}`),
    ),
    view.charts.size ? h("img", { src: pictureOf(view).toDataURL(), alt: "curves" }) : null,
    h("h2", null, "Last values"),
    rowsOf(Object.entries(names).map(([name, [, values]]) => [name, number(values.at(-1))])),
    h("h2", null, "Options"),
    rowsOf(Object.entries(config)),
  );
  // The browser applies this page's policy to styles of a new document, too, so the head is added to
  // the text. What comes from a run is in elements, and so escaped.
  const text = new XMLSerializer().serializeToString(file.documentElement);
  return `<!doctype html>\n${text.replace("<head>", () => `<head>${HEAD}`)}`;
}
