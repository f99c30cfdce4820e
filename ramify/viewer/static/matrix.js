// A matrix of evaluations: suites, lengths and families are the rows; models, modes and scaffolds are
// the columns. A cell shows its score with its interval, and opens its figures and its attempts.

import { get, offline, optional } from "./api.js";
import { fill, h } from "./dom.js";
import { count, dollars, many, number, oneLine, runAddress, seconds } from "./format.js";
import { table } from "./table.js";

const OF_ITEMS = ["suite", "length", "family"]; // coordinates of a row
const OF_SYSTEMS = ["model", "mode", "scaffold", "system"]; // coordinates of a column
const MOST_ATTEMPTS = 500; // in the table of a cell
const EVERY_MS = 2000; // between requests while attempts are still being made

async function matrixPage(page, keys) {
  const view = new MatrixView(keys[0] || "");
  await view.start(page);
  return view;
}

class MatrixView {
  constructor(key) {
    this.key = key;
    this.chosen = ""; // place of the cell whose attempts are shown
    this.body = h("div.wide");
    this.detail = h("section.cell-detail", { "aria-live": "polite" });
  }

  async start(page) {
    fill(page, h("div.pad", null, "loading …"));
    await this.load();
    fill(page, this.body, this.detail);
    const isOpen = () => this.data.rows.some((row) => row.made < row.planned);
    if (!offline && isOpen())
      this.timer = setInterval(() => !document.hidden && this.load().catch(() => {}), EVERY_MS);
  }

  close() {
    clearInterval(this.timer);
  }

  async load() {
    this.data = await get("/api/matrix", { key: this.key });
    this.draw();
    if (this.data.rows.every((row) => row.made >= row.planned)) clearInterval(this.timer);
  }

  draw() {
    const { rows, id, path, items, attempts, problems, first_error } = this.data;
    document.title = `Matrix ${id} · Ramify`;
    const made = cellRows(rows).reduce((sum, row) => sum + row.made, 0),
      planned = cellRows(rows).reduce((sum, row) => sum + row.planned, 0);
    fill(
      this.body,
      h(
        "div.wide-head",
        null,
        h("h1", null, `Matrix ${id}`),
        h(
          "span.quiet",
          null,
          `${many(items, "item")} of each family, ${many(attempts, "attempt")} each${made < planned ? ` · ${number(made)} of ${number(planned)} attempts done` : ""}`,
        ),
        offline ? null : h("a.small", { href: "#/evaluation" }, "all evaluations"),
      ),
      path ? h("p.quiet.file", null, path) : null,
      (problems || []).map((text) => h("p.problem", { role: "alert" }, text)),
      h("div.scroll-x", null, this.grid()),
      matrixLegend(this.data),
      moneySection(this.data.money),
      first_error ? h("p.problem", null, `an attempt failed: ${first_error}`) : null,
    );
  }

  grid() {
    const { rows } = this.data;
    const places = uniquePlaces(rows.map((row) => coordinates(row, OF_ITEMS))),
      systems = uniquePlaces(rows.map((row) => coordinates(row, OF_SYSTEMS))),
      byPlace = new Map(rows.map((row) => [rowKey(row), row])),
      heads = OF_ITEMS.filter((axis) => rows.some((row) => row.place[axis])),
      varied = OF_SYSTEMS.filter((axis) => new Set(rows.map((row) => row.place[axis])).size > 1);
    /** @type {import("./table.js").Column[]} */
    const columns = heads.map((axis) => ({
      name: axis,
      isHead: axis === heads[heads.length - 1],
      cell: (place) => place[OF_ITEMS.indexOf(axis)] || "",
    }));
    for (const system of systems) {
      const words = varied.map((axis) => system[OF_SYSTEMS.indexOf(axis)]).filter(Boolean);
      const rowAt = (place) => byPlace.get(JSON.stringify([place, system]));
      columns.push({
        name: words.length ? words.map((word) => h("div", null, word)) : system[0],
        cell: (place) => this.cell(rowAt(place)),
        tone: () => "score-cell",
        style: (place) => washOf(rowAt(place)),
      });
    }
    return table("table.figures.score-matrix", columns, places, { label: "scores" });
  }

  cell(row) {
    if (!row) return h("span.quiet", null, "–");
    const { score, difference } = row,
      sure = difference && (difference.low > 0 || difference.high < 0),
      key = rowKey(row);
    return h(
      "button",
      {
        type: "button",
        "aria-pressed": String(this.chosen === key),
        onclick: () => this.open(row),
      },
      h("span.offscreen", null, `${Object.values(row.place).join(", ")}: `),
      h("b", null, score ? score.value.toFixed(3) : "–"),
      score ? h("small", null, `${score.low.toFixed(2)} to ${score.high.toFixed(2)}`) : null,
      h("small", null, cellWords(row)),
      sure
        ? h(
            "small",
            { title: "significant difference from the first column" },
            `${difference.value > 0 ? "▲ +" : "▼ "}${difference.value.toFixed(3)}`,
          )
        : null,
    );
  }

  async open(row) {
    this.chosen = rowKey(row);
    this.draw();
    fill(this.detail, cellFigures(row, this.data.k), h("p.quiet", null, "loading the attempts …"));
    try {
      const found = await Promise.all(row.records.map((record) => this.attempts(record)));
      if (this.chosen !== rowKey(row)) return;
      const attempts = found.flat().filter((each) => isOfFamily(each, row));
      fill(
        this.detail,
        cellFigures(row, this.data.k),
        this.links(row),
        h("div.scroll-x", null, cellAttempts(attempts)),
        attempts.length > MOST_ATTEMPTS
          ? h(
              "p.note",
              null,
              `showing the first ${number(MOST_ATTEMPTS)} of ${number(attempts.length)}`,
            )
          : null,
      );
    } catch (error) {
      fill(this.detail, h("p.problem", { role: "alert" }, error.message));
    }
    this.detail.scrollIntoView({ block: "nearest" });
  }

  // The figures of all cells.
  shared() {
    const { rows, id, k } = this.data,
      axes = [...OF_ITEMS, ...OF_SYSTEMS].filter((axis) => rows.some((row) => row.place[axis])),
      // The tiles of a cell, as in the open one.
      parts = rows.map((row) => new Map(cellParts(row, k))),
      heads = [...new Set(parts.flatMap((each) => [...each.keys()]))];
    return {
      name: `matrix-${id}`,
      title: `Matrix ${id}`,
      parts: [
        {
          table: {
            head: [...axes, ...heads],
            rows: rows.map((row, at) => [
              ...axes.map((axis) => row.place[axis] || ""),
              ...heads.map((head) => parts[at].get(head) ?? ""),
            ]),
          },
        },
      ],
      file: `/api/matrix/file?key=${encodeURIComponent(this.key)}`,
    };
  }

  async attempts(record) {
    if (offline) return offline.attempts[record] || [];
    const key = this.data.keys[record];
    return key ? (await get("/api/evaluation", { key })).attempts : [];
  }

  links(row) {
    const keys = offline ? [] : row.records.filter((record) => this.data.keys[record]);
    return h(
      "p",
      null,
      keys.map((record) =>
        h(
          "a.small",
          { href: `#/evaluation/${encodeURIComponent(this.data.keys[record])}` },
          keys.length > 1 ? record : "items, answers and labels",
        ),
      ),
    );
  }
}

// The rows that are not sums over others.
function cellRows(rows) {
  const ofRecord = new Map();
  for (const row of rows.filter((each) => each.records.length === 1 && !each.is_kind))
    ofRecord.set(row.records[0], row);
  return [...ofRecord.values()];
}

function coordinates(row, axes) {
  return axes.map((axis) => row.place[axis] || "");
}

function rowKey(row) {
  return JSON.stringify([coordinates(row, OF_ITEMS), coordinates(row, OF_SYSTEMS)]);
}

function uniquePlaces(places) {
  return [...new Map(places.map((place) => [JSON.stringify(place), place])).values()];
}

// Attempts of a suite that asks its families together are in one record.
function isOfFamily(attempt, row) {
  const family = row.place.family;
  return !row.is_kind || (attempt.kind || "(no kind)") === family;
}

// From the wash of wrong answers to that of right ones.
function washOf(row) {
  if (!row?.score) return {};
  const share = `${Math.round(100 * Math.min(1, Math.max(0, row.score.value)))}%`;
  return { background: `color-mix(in srgb, var(--good-wash) ${share}, var(--bad-wash))` };
}

function cellWords(row) {
  if (row.made < row.planned) return `${number(row.made)} of ${number(row.planned)}`;
  const unfit = row.reasons["not fitting"] || 0;
  if (unfit === row.made && unfit) return "not fitting";
  return row.cost === null ? "" : dollars(row.cost);
}

// Scores with smaller budgets, of all modes and systems.
function moneySection(tables) {
  if (!tables?.length) return null;
  return h(
    "section",
    null,
    h("h2", null, "Score by budget"),
    h(
      "p.quiet",
      null,
      "The score at each budget per attempt. An attempt that cost more counts as unanswered.",
    ),
    tables.map(({ items, budgets, systems }) => {
      /** @type {import("./table.js").Column[]} */
      const columns = [
        { name: items, isHead: true, cell: ([name]) => name },
        ...budgets.map((budget, at) => ({
          name: budget,
          isNumber: true,
          cell: ([, points]) => points[at]?.score.value.toFixed(3) ?? "–",
          tone: () => "score-cell",
          style: ([, points]) => washOf(points[at]),
        })),
      ];
      const label = `score by budget, ${items}`;
      return h(
        "div.scroll-x",
        null,
        table("table.figures.money-matrix", columns, Object.entries(systems), { label }),
      );
    }),
  );
}

function matrixLegend({ baseline, k }) {
  const words = Object.values(baseline).join(", ");
  return h(
    "p.quiet",
    null,
    `Each cell shows the score, its 95 % interval over items, and the cost.${words ? ` ▲ and ▼ mark a difference from ${words}, over the same items, whose interval excludes 0.` : ""}${k > 1 ? ` Open a cell for its pass@${k}.` : ""}`,
  );
}

// [name, text] of each figure of a cell.
/** @returns {[string, string][]} */
function cellParts(row, k) {
  const shown = (figure, sign = "") =>
    figure
      ? `${sign && figure.value >= 0 ? sign : ""}${figure.value.toFixed(3)} [${figure.low.toFixed(2)} ${figure.high.toFixed(2)}]`
      : "–";
  const reasons = Object.entries(row.reasons).map(([reason, num]) => `${number(num)} ${reason}`);
  /** @type {[string, string][]} */
  const parts = [["score", shown(row.score)]];
  if (k > 1) parts.push([`pass@${k}`, shown(row.passes)]);
  if (row.difference) parts.push(["difference", shown(row.difference, "+")]);
  parts.push(
    ["items", number(row.items)],
    ["attempts", number(row.made)],
    ["cost", dollars(row.cost)],
    ["calls", number(row.calls)],
    ["tokens", `${count(row.input_tokens)} in, ${count(row.output_tokens)} out`],
    ["p50, p95", `${seconds(row.seconds_p50)}, ${seconds(row.seconds_p95)}`],
  );
  if (row.own)
    parts.push([
      "self-reported",
      `${number(row.own.calls)} calls, ${count(row.own.tokens)} tokens${row.own.attempts < row.made ? ` in ${number(row.own.attempts)} attempts` : ""}`,
    ]);
  if (reasons.length) parts.push(["not right", reasons.join(", ")]);
  return parts;
}

function cellFigures(row, k) {
  return [
    h("h2", null, Object.values(row.place).join(" · ")),
    h(
      "dl.tiles",
      { "aria-label": "figures" },
      cellParts(row, k).map(([name, value]) =>
        h("div.tile", null, h("dt", null, name), h("dd", null, value)),
      ),
    ),
  ];
}

/** @type {import("./table.js").Column[]} */
const CELL_COLUMNS = [
  {
    name: "item",
    cell: (each) => (each.run ? h("a", { href: runAddress(each.run) }, each.item) : each.item),
  },
  { name: "attempt", isNumber: true, cell: (each) => number(each.attempt + 1) },
  {
    name: "result",
    cell: (each) => each.reason || "right",
    tone: (each) => (each.right ? "good" : "bad"),
  },
  { name: "reward", isNumber: true, cell: (each) => number(each.reward) },
  { name: "answer", cell: (each) => oneLine(each.answer || each.error || "", 120) },
  { name: "tokens", isNumber: true, cell: (each) => count(each.tokens) },
  { name: "cost", isNumber: true, cell: (each) => dollars(each.cost) },
  { name: "time", isNumber: true, cell: (each) => seconds(each.seconds) },
];

function cellAttempts(attempts) {
  if (!attempts.length) return h("p.note", null, "No attempts have been made yet.");
  return table("table.figures.records", CELL_COLUMNS, attempts.slice(0, MOST_ATTEMPTS), {
    label: "attempts",
  });
}

optional.matrix = matrixPage;
