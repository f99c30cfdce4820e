// Maps: the list of them; and for one map its rows with answers, errors and cost. A row opens as a
// run. Of thousands of rows only visible ones are elements.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { dollars, many, moment, number, oneLine, runAddress, seconds } from "./format.js";
import { VirtualList } from "./list.js";
import { listRecords, showNothing } from "./records.js";

const REFRESH_MS = 2000; // between requests while the map is in progress

// What the rows of a map can be filtered by.
/** @type {import("./filter.js").Fields} */
const ROW_FIELDS = {
  numbers: {
    row: (each) => each.row,
    cost: (each) => each.cost,
    seconds: (each) => each.seconds || 0,
    requests: (each) => each.calls || 0,
    equal: (each) => each.equal || 0,
  },
  texts: {
    text: (each) => each.text || "",
    answer: (each) => each.answer ?? "",
    error: (each) => each.error || "",
    state: (each) => each.state,
    by: meansOf,
  },
  words: (each) => `${each.text || ""} ${each.answer ?? ""} ${each.error || ""} ${each.state}`,
};

const TONES = { answered: "good", failed: "bad", open: "" };

function meansOf(each) {
  return each.run ? "session" : "call";
}

export async function mapPage(page, keys) {
  if (!keys.length) return listMaps(page, (await get("/api/maps")).maps);
  const view = new MapView(keys[0], keys[1] || "");
  await view.start(page);
  return view;
}

function mapAddress(key, filter = "") {
  return `#/map/${encodeURIComponent(key)}${filter.trim() ? `/${encodeURIComponent(filter)}` : ""}`;
}

/** @type {import("./table.js").Column[]} */
const MAP_COLUMNS = [
  {
    name: "question",
    cell: (each) => h("a", { href: mapAddress(each.key) }, oneLine(each.question, 90)),
  },
  { name: "model", cell: (each) => each.model },
  { name: "rows", isNumber: true, cell: rowsWords },
  { name: "failed", isNumber: true, cell: (each) => number(each.failed) },
  { name: "requests", isNumber: true, cell: (each) => number(each.calls) },
  { name: "cost", isNumber: true, cell: (each) => dollars(each.cost) },
  { name: "started", cell: (each) => moment(each.started_at) },
  { name: "output", cell: (each) => each.out.split("/").pop() },
];

// Rows so far, and of how many, unless all are there.
function rowsWords({ rows, total }) {
  return total && rows < total ? `${number(rows)} of ${number(total)}` : number(rows);
}

function listMaps(page, maps) {
  document.title = "Maps · Ramify";
  if (maps.length) return listRecords(page, "Maps", "map", MAP_COLUMNS, maps);
  const command = "ramify map QUESTION ROWS… --out FILE";
  showNothing(page, "Maps", "The given paths contain no maps.", "Create one with", command);
  return null;
}

class MapView {
  constructor(key, filter) {
    this.key = key;
    this.data = null; // until the map has arrived: a filter may be typed before
    this.shown = [];
    this.filter = new FilterInput(ROW_FIELDS, {
      label: "filter rows",
      placeholder: "words, or state:failed answer:yes cost>0.01 sort:cost",
      changed: () => this.filtered(),
      text: filter,
      id: "filter",
    });
    this.list = new VirtualList({
      rowHeight: 34,
      make: makeRow,
      show: (row, index) => showRow(row, this.shown[index]),
      label: "rows",
      pick: (index) => {
        const { key } = this.shown[index];
        if (key) location.hash = runAddress(key); // a row of a Ray cluster has no run
      },
    });
    this.list.onmove = () => {};
  }

  async start(page) {
    this.body = h("div.evaluation");
    this.tally = h("span.quiet", { "aria-live": "polite" });
    this.states = h("div.facets", { role: "group", "aria-label": "quick filters" });
    fill(
      page,
      h(
        "div.wide",
        null,
        this.body,
        h(
          "div.wide-head",
          null,
          h("h2", null, "Rows"),
          this.filter.input,
          this.tally,
          this.filter.fix,
          this.states,
        ),
        h("div.attempts", null, this.list.box),
      ),
    );
    await this.load();
    this.timer = setInterval(
      () => this.data.alive && !document.hidden && this.load().catch(() => {}),
      REFRESH_MS,
    );
  }

  close() {
    clearInterval(this.timer);
    this.list.close();
  }

  async load() {
    this.data = await get("/api/map", { key: this.key });
    this.draw();
    this.arrange();
  }

  // The filter is part of the address, so that it can be shared and reloaded.
  filtered() {
    history.replaceState(null, "", mapAddress(this.key, this.filter.text));
    if (this.data) this.arrange();
  }

  // The rows that match the filter.
  shared() {
    const { data, shown } = this;
    return {
      name: `map-${oneLine(data.question, 40).replace(/\W+/g, "-")}`,
      title: oneLine(data.question, 300),
      parts: [
        { text: this.figuresOf().join(" · ") },
        {
          table: {
            head: ["row", "text", "answer", "error", "state", "cost", "time"],
            rows: shown.map((each) => [
              String(each.row),
              each.text || "",
              each.answer ?? "",
              each.error || "",
              each.state,
              each.cost === undefined || each.cost === null ? "" : dollars(each.cost),
              seconds(each.seconds || 0),
            ]),
          },
        },
      ],
    };
  }

  figuresOf() {
    const { data } = this,
      rest = data.total && data.rows < data.total;
    return [
      `${rowsWords(data)} rows`,
      data.failed ? `${number(data.failed)} failed` : "",
      `${many(data.questions, "question")} asked`,
      many(data.calls, "request"),
      dollars(data.cost),
      data.alive ? "in progress" : rest ? "some rows were not asked" : "",
    ].filter(Boolean);
  }

  draw() {
    const { data } = this;
    document.title = `${oneLine(data.question, 60)} · Ramify`;
    fill(
      this.body,
      h(
        "div.wide-head",
        null,
        h("h1", null, oneLine(data.question, 200)),
        h("span.badge", null, data.model),
        h("span.quiet", null, this.figuresOf().join(" · ")),
        h("a.small", { href: "#/map" }, "all maps"),
      ),
      h("p.quiet.file", null, data.out),
      data.shown.length < data.questions
        ? h("p.note", null, `Only the first ${many(data.shown.length, "question")} are shown.`)
        : null,
    );
  }

  arrange() {
    const rows = this.data.shown,
      { matches, order } = this.filter;
    this.shown = rows.filter(matches);
    if (order) this.shown.sort(order);
    const part = this.filter.text.trim() ? `${number(this.shown.length)} of ` : "";
    fill(this.tally, `${part}${number(rows.length)}`);
    const counts = new Map();
    for (const { state } of rows) counts.set(state, (counts.get(state) || 0) + 1);
    fill(
      this.states,
      [...counts].map(([state, count]) =>
        h(
          "button.small",
          { type: "button", onclick: () => this.filter.set(`state:${state}`) },
          `state:${state} `,
          h("span.quiet", null, number(count)),
        ),
      ),
    );
    this.list.box.style.height = `${Math.min(18, Math.max(1, this.shown.length)) * 34 + 2}px`;
    this.list.set(this.shown.length);
  }

  keys() {
    return { "/": ["filter rows", () => this.filter.focus()] };
  }
}

function makeRow() {
  return h(
    "div.attempt.map-row",
    null,
    h("span.num.place"),
    h("span.item"),
    h("span.answer-of"),
    h("span.mark"),
    h("span.num.took"),
    h("span.quiet.leads"),
  );
}

function showRow(row, each) {
  const [place, item, answer, mark, took, leads] = row.children;
  place.textContent = number(each.row);
  item.textContent = each.text || "";
  answer.textContent = oneLine(each.error || each.answer || "", 160);
  answer.classList.toggle("bad", Boolean(each.error));
  mark.textContent = each.state;
  mark.className = `mark ${TONES[each.state]}`;
  took.textContent = each.key
    ? `${dollars(each.cost ?? null)} · ${seconds(each.seconds || 0)}`
    : "";
  leads.textContent = each.equal ? `×${number(1 + each.equal)}` : each.run ? "run →" : "";
  row.title = [each.text, each.answer, each.error].filter(Boolean).join("\n");
}
