// Sources of a run: the table of what was read and what was left out, the beginning of a source,
// and the citations of the answer, each of which opens its place.

import { get, offline } from "./api.js";
import { fill, h } from "./dom.js";
import { grouped, many, oneLine } from "./format.js";
import { table } from "./table.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export class Sources {
  // run: the page's model
  constructor(run) {
    this.run = run;
    this.drawn = ""; // the citations that are shown
    this.citations = h("ol.citations", { "aria-label": "citations of the answer", hidden: true });
    this.summary = h("summary");
    this.list = h("div.source-list");
    this.read = h("details.sources", { hidden: true }, this.summary, this.list);
    this.read.ontoggle = () => this.read.open && this.drawTable();
    this.text = h("section.source-text", { "aria-label": "text of a source", hidden: true });
  }

  draw() {
    const head = this.run.head,
      unread = head.num_unread ? `, ${grouped(head.num_unread)} not loaded` : "";
    this.read.hidden = !head.num_sources && !head.num_unread;
    this.summary.textContent = `read: ${many(head.num_sources, "source")}${unread}`;
    const citations = head.citations || [],
      words = JSON.stringify(citations);
    if (this.drawn === words) return;
    this.drawn = words;
    this.citations.hidden = !citations.length;
    fill(
      this.citations,
      citations.map((each) =>
        h(
          "li",
          null,
          h(
            "button.link",
            { type: "button", onclick: () => this.open(each.source, each) },
            `${each.source === "context" ? "" : `${each.source}, `}${each.place ? `${each.place}, ` : ""}${linesOf(each)}`,
          ),
          h("q", null, oneLine(each.quote, 160)),
        ),
      ),
    );
  }

  async drawTable() {
    if (this.list.firstChild) return;
    fill(this.list, h("p.quiet", null, "loading …"));
    let read;
    try {
      read = await get("/api/sources", { key: this.run.head.key });
    } catch (error) {
      return void fill(this.list, h("p.problem", null, error.message));
    }
    /** @type {import("./table.js").Column[]} */
    const columns = [
      {
        name: "source",
        isHead: true,
        cell: (item) =>
          item.chars && !offline
            ? h(
                "button.link",
                {
                  type: "button",
                  title: "show its beginning",
                  onclick: () => this.open(item.key),
                },
                item.name,
              )
            : item.name,
      },
      { name: "kind", cell: (item) => item.kind },
      { name: "size", isNumber: true, cell: (item) => bytes(item.bytes) },
      { name: "contents", cell: (item) => item.detail || `${grouped(item.chars)} characters` },
    ];
    const more = read.num_items - read.items.length;
    fill(
      this.list,
      read.items.length ? table("table.figures", columns, read.items) : null,
      more > 0 ? h("p.note", null, `and ${many(more, "source")} more`) : null,
      read.problems.map((each) =>
        h("p.not-read", null, h("span.bad", null, "not loaded: "), `${each.name} ${each.reason}`),
      ),
      read.num_problems > read.problems.length
        ? h("p.note", null, `and ${grouped(read.num_problems - read.problems.length)} more`)
        : null,
      read.left_out.map((each) =>
        h(
          "p.not-read",
          null,
          `left out (${grouped(each.num)}), ${each.reason}: ${each.names.join(", ")}${each.num > each.names.length ? " …" : ""}`,
        ),
      ),
    );
  }

  // Shows the text `name` of the context: its beginning, or the lines of a citation.
  async open(name, citation = null) {
    this.text.hidden = false;
    fill(this.text, h("p.quiet", null, "loading …"));
    let found;
    try {
      found = await get("/api/source", {
        key: this.run.head.key,
        name,
        line: citation ? citation.first_line : 1,
      });
    } catch (error) {
      return void fill(this.text, this.close(), h("p.problem", null, error.message));
    }
    const last = found.first + found.lines.length - 1,
      isCited = (line) => citation && citation.first_line <= line && line <= citation.last_line;
    const rows = found.lines.map((line, index) =>
      h(
        "div.source-line",
        { class: isCited(found.first + index) ? "cited" : "" },
        h("span.line-number", null, String(found.first + index)),
        h("span", null, line || " "),
      ),
    );
    const place = citation?.place ? `, ${citation.place}` : "";
    const lines = h(
      "div.source-lines",
      { tabindex: "0", role: "region", "aria-label": `lines of ${name}` },
      rows,
    );
    fill(
      this.text,
      h(
        "p",
        null,
        h("b", null, name),
        `${place}: lines ${grouped(found.first)} to ${grouped(last)} of ${grouped(found.num_lines)} `,
        this.close(),
      ),
      lines,
    );
    const cited = rows.find((row) => row.classList.contains("cited"));
    if (cited) lines.scrollTop = cited.offsetTop - 60;
    lines.focus({ preventScroll: true });
  }

  close() {
    return h("button.small", { type: "button", onclick: () => (this.text.hidden = true) }, "close");
  }
}

function linesOf({ first_line: first, last_line: last }) {
  return first === last ? `line ${grouped(first)}` : `lines ${grouped(first)} to ${grouped(last)}`;
}

function bytes(number) {
  let unit = 0;
  let size = number;
  while (size >= 1000 && unit < UNITS.length - 1) {
    size /= 1000;
    unit++;
  }
  return `${Number(size.toPrecision(3))} ${UNITS[unit]}`;
}
