// What leaves a page, under one button: a link, and what the page shows as one HTML file, Markdown,
// a picture or a table. A page says what that is as a list of parts; here they become files.
//
//   page ── shared() ──> { name, title, parts } ──> link · file · Markdown · PNG · CSV
//
// All of it comes from the parts and from the address after #, so the access token is in none. The
// file of a run is larger, and made by the server (viewer/script_bundle.py).

import { offline, optional } from "./api.js";
import { copy, fill, h, toast } from "./dom.js";
import { grouped } from "./format.js";

/**
 * Rows of texts, and in a CSV of numbers, below their heads.
 * @typedef {{ head: string[], rows: (string | number)[][] }} SharedTable
 */

/**
 * One part of a page; exactly one of its fields is given.
 * @typedef {object} SharedPart
 * @property {string} [heading]
 * @property {string} [text] a line, or a few
 * @property {string} [code] a text whose lines and signs matter
 * @property {SharedTable} [table]
 * @property {HTMLCanvasElement} [canvas]
 */

/**
 * What a page shows, to be shared.
 * @typedef {object} Shared
 * @property {string} name of the files, without its ending
 * @property {string} title
 * @property {SharedPart[]} parts
 * @property {string} [file] address of a file that the server makes
 * @property {SharedTable} [csv] what is saved as CSV; by default the last table
 * @property {[string, string, string][]} [links] further [words, description, address]
 */

const MAX_MARKDOWN_ROWS = 200; // of a table in Markdown; CSV and the file have all
const MAX_DRAWN = 40; // rows of a table in a picture
const MAX_LINES = 12; // of a text in a picture
const WIDE = 1200; // pixels of a picture
const TALL = 10_000; // at most
const EDGE = 32;
const LINE = 21;
const CELL = 320; // most pixels of a table's column

// The head of a file: it may load nothing and run nothing.
const HEAD =
  '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; ' +
  "img-src data:; style-src 'unsafe-inline'\">" +
  '<meta name="viewport" content="width=device-width, initial-scale=1">' +
  '<meta name="color-scheme" content="light dark"><style>' +
  "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px}" +
  "img{max-width:100%}div{overflow-x:auto}table{border-collapse:collapse}" +
  "td,th{text-align:left;vertical-align:top;padding:3px 14px 3px 0;border-bottom:1px solid #8884}" +
  "th{white-space:nowrap}td{max-width:44ch;overflow-wrap:break-word}" +
  "pre{white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #8888;padding-left:12px}" +
  "</style>";

// view: the page that is shown, or null
async function openShare(view) {
  /** @type {Shared | null} */
  const shared = view?.shared ? await view.shared() : null,
    done = (work) => async () => {
      dialog.close();
      try {
        await work();
      } catch (error) {
        toast(error.message);
      }
    };
  const choice = (name, about, work) =>
    h(
      "button",
      { type: "button", onclick: done(work) },
      h("b", null, name),
      h("span", null, about),
    );
  const leading = (name, about, address) =>
    h(
      "a",
      {
        href: address,
        download: address.startsWith("#") ? null : "",
        onclick: () => dialog.close(),
      },
      h("b", null, name),
      h("span", null, about),
    );
  for (const part of shared?.parts || []) if (part.table) part.table = filledColumns(part.table);
  const csv = shared?.csv ?? shared?.parts.findLast((part) => part.table)?.table;
  const dialog = h(
    "dialog.share",
    { id: "share", "aria-labelledby": "share-title" },
    h("h2", { id: "share-title" }, "Share"),
    offline
      ? null
      : choice("link", "to this page, for anyone with access to this viewer", () =>
          copy(linkToPage(), "link"),
        ),
    shared
      ? [
          offline
            ? null
            : shared.file
              ? leading("file", "the whole page as HTML; works offline", shared.file)
              : choice("file", "what the page shows as HTML; works offline", () =>
                  save(`${shared.name}.html`, "text/html", fileOf(shared)),
                ),
          choice("Markdown", "copied to the clipboard", () => copy(markdownOf(shared), "Markdown")),
          choice("PNG", "a picture", () => savePicture(shared)),
          csv
            ? choice("CSV", "the table", () => save(`${shared.name}.csv`, "text/csv", csvOf(csv)))
            : null,
          (shared.links || []).map(([name, about, address]) => leading(name, about, address)),
        ]
      : null,
    h("button.small", { type: "button", onclick: () => dialog.close() }, "close"),
  );
  if (document.getElementById("share")) return; // of an earlier click
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

// Without ?token=, which the browser's cookie replaces.
function linkToPage() {
  return `${location.origin}${location.pathname}${location.hash || "#/"}`;
}

function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type })),
    link = h("a", { download: name });
  link.href = address;
  link.click();
  URL.revokeObjectURL(address);
  toast(`${name} saved`);
}

// A table without the columns in which nothing is said.
/** @param {SharedTable} table @returns {SharedTable} */
function filledColumns({ head, rows }) {
  const kept = head
      .map((_, at) => at)
      .filter((at) => !rows.length || rows.some((row) => row[at] !== "")),
    part = (row) => kept.map((at) => row[at]);
  return { head: part(head), rows: rows.map(part) };
}

function savePicture(shared) {
  pictureOfParts(shared).toBlob((blob) => save(`${shared.name}.png`, "image/png", blob));
}

// --- Markdown ------------------------------------------------------------------------------------

export function markdownOf({ title, parts }) {
  return `${[`# ${plainWords(title)}`, ...parts.map(markdownPart)].filter(Boolean).join("\n\n")}\n`;
}

/** @param {SharedPart} part */
function markdownPart({ heading, text, code, table }) {
  if (heading) return `## ${plainWords(heading)}`;
  if (text) return text.split("\n").map(plainLine).join("  \n");
  if (code) return fenced(code);
  if (!table) return "";
  const row = (cells) => `| ${cells.map((cell) => plainWords(cell)).join(" | ")} |`,
    more = table.rows.length - MAX_MARKDOWN_ROWS;
  return [
    row(table.head),
    `|${table.head.map(() => " --- |").join("")}`,
    ...table.rows.slice(0, MAX_MARKDOWN_ROWS).map(row),
    more > 0 ? `\nand ${grouped(more)} more` : "",
  ]
    .filter(Boolean)
    .join("\n");
}

// A text that Markdown shows as it is, on one line: no markup, no HTML, and no picture from elsewhere.
function plainWords(text) {
  return text
    .replace(/\s+/g, " ")
    .trim()
    .replace(/[\\`*_[\]<>|~$&]/g, "\\$&");
}

// The same at the beginning of a line, where some signs make a heading or a list.
function plainLine(text) {
  return plainWords(text).replace(/^(\d*)([-+=#.)])/, "$1\\$2");
}

// A fence that is longer than all in the text.
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length)),
    fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

// --- CSV -----------------------------------------------------------------------------------------

/** @param {SharedTable} table */
function csvOf({ head, rows }) {
  return `${[head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n")}\r\n`;
}

// A spreadsheet would run a text that begins like a formula.
function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// --- a file --------------------------------------------------------------------------------------

/** @param {Shared} shared */
function fileOf({ title, parts }) {
  const file = document.implementation.createHTMLDocument(title);
  fill(file.body, h("h1", null, title), parts.map(filePart));
  // The browser applies this page's policy to styles of a new document, too, so the head is added to
  // the text. What comes from a run is in elements, and so escaped.
  const text = new XMLSerializer().serializeToString(file.documentElement);
  return `<!doctype html>\n${text.replace("<head>", () => `<head>${HEAD}`)}`;
}

/** @param {SharedPart} part */
function filePart({ heading, text, code, table, canvas }) {
  if (heading) return h("h2", null, heading);
  if (text) return text.split("\n").map((line) => h("p", { dir: "auto" }, line));
  if (code) return h("pre", { dir: "auto" }, code);
  if (canvas) return h("img", { src: canvas.toDataURL(), alt: "picture of the page" });
  const row = (cells, tag) =>
    h(
      "tr",
      null,
      cells.map((cell) => h(tag, null, cell)),
    );
  return table
    ? h(
        "div",
        null,
        h(
          "table",
          null,
          h("thead", null, row(table.head, "th")),
          h(
            "tbody",
            null,
            table.rows.map((cells) => row(cells, "td")),
          ),
        ),
      )
    : null;
}

// --- a picture -----------------------------------------------------------------------------------

/** @param {Shared} shared */
function pictureOfParts({ title, parts }) {
  const sheet = new Sheet();
  sheet.lines(title, "600 20px system-ui", "--ink", 3);
  for (const { heading, text, code, table, canvas } of parts) {
    sheet.y += 10;
    if (heading) sheet.lines(heading, "600 15px system-ui", "--ink", 2);
    else if (text) sheet.lines(text, "14px system-ui", "--ink-2", MAX_LINES);
    else if (code) sheet.lines(code, "13px monospace", "--ink", MAX_LINES);
    else if (canvas) sheet.picture(canvas);
    else if (table) sheet.table(table);
  }
  return sheet.drawn();
}

// A page of paper that grows downwards; it is drawn when its height is known.
class Sheet {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.pen = this.canvas.getContext("2d");
    this.style = getComputedStyle(document.documentElement);
    this.strokes = [];
    this.y = EDGE;
  }

  put(text, x, font, tone) {
    const y = this.y + 0.72 * LINE;
    this.strokes.push(() => {
      this.pen.font = font;
      this.pen.fillStyle = this.style.getPropertyValue(tone);
      this.pen.fillText(text, x, y);
    });
  }

  lines(text, font, tone, most) {
    this.pen.font = font;
    const lines = wrapped(this.pen, text, WIDE - 2 * EDGE, most);
    for (const line of lines) {
      this.put(line, EDGE, font, tone);
      this.y += LINE;
    }
  }

  picture(canvas) {
    const dot = devicePixelRatio || 1,
      scale = Math.min(1, (WIDE - 2 * EDGE) / (canvas.width / dot)),
      [wide, high, y] = [(scale * canvas.width) / dot, (scale * canvas.height) / dot, this.y];
    if (!wide || !high) return;
    this.strokes.push(() => this.pen.drawImage(canvas, EDGE, y, wide, high));
    this.y += high;
  }

  table({ head, rows }) {
    const shown = rows.slice(0, MAX_DRAWN),
      [bold, font] = ["600 13px system-ui", "13px system-ui"];
    this.pen.font = bold;
    const natural = head.map((_, at) =>
        Math.min(
          CELL,
          ...[
            Math.max(
              ...[head, ...shown].map((row) => this.pen.measureText(row[at].slice(0, 200)).width),
            ),
          ],
        ),
      ),
      room = WIDE - 2 * EDGE - 14 * head.length,
      share = Math.min(1, room / natural.reduce((a, b) => a + b, 0)),
      widths = natural.map((each) => Math.max(24, each * share));
    for (const [index, row] of [head, ...shown].entries()) {
      let x = EDGE;
      this.pen.font = index ? font : bold;
      for (const [at, cell] of row.entries()) {
        const [line = ""] = wrapped(this.pen, cell.replace(/\s+/g, " "), widths[at], 1);
        this.put(line, x, index ? font : bold, index ? "--ink" : "--ink-3");
        x += widths[at] + 14;
      }
      this.y += LINE;
    }
    if (rows.length > shown.length)
      this.lines(`and ${grouped(rows.length - shown.length)} more`, font, "--ink-3", 1);
  }

  drawn() {
    const { canvas, pen } = this,
      dot = devicePixelRatio || 1,
      high = Math.min(TALL, this.y + EDGE);
    [canvas.width, canvas.height] = [WIDE * dot, high * dot];
    pen.scale(dot, dot);
    pen.fillStyle = this.style.getPropertyValue("--paper");
    pen.fillRect(0, 0, WIDE, high);
    for (const stroke of this.strokes) stroke();
    return canvas;
  }
}

// The lines of a text that fit into a width, at most so many; an ellipsis ends a text that is longer.
function wrapped(pen, text, width, most) {
  const lines = [];
  for (const paragraph of text.slice(0, 20_000).split("\n")) {
    let rest = paragraph;
    do {
      if (lines.length === most) {
        lines[most - 1] = `${fitting(pen, lines[most - 1], width, " …")} …`;
        return lines;
      }
      const part = fitting(pen, rest, width, ""),
        space = part.length < rest.length ? part.lastIndexOf(" ") : -1,
        line = space > 0 ? part.slice(0, space) : part;
      lines.push(line);
      rest = rest.slice(line.length).trimStart();
    } while (rest);
  }
  return lines;
}

// The longest beginning of a text that fits with `end` after it; at least one sign of it.
function fitting(pen, text, width, end) {
  let [low, high] = [Math.min(1, text.length), text.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pen.measureText(text.slice(0, middle) + end).width <= width) low = middle;
    else high = middle - 1;
  }
  return text.slice(0, low);
}

optional.share = openShare;
