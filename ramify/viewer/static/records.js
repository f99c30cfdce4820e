// What a page shows while no record is chosen: the list of its records, or that there is none and
// which command makes one.

import { fill, h } from "./dom.js";
import { many } from "./format.js";
import { table, tableTexts } from "./table.js";

// Say that there is nothing to show. `missing` and `remedy` are sentences; `command` ends the second.
export function showNothing(page, title, missing, remedy, command) {
  fill(
    page,
    h(
      "div.empty",
      null,
      h("h1", null, title),
      h("p", null, missing),
      h("p", null, `${remedy} `, h("code", null, command)),
    ),
  );
}

// `noun` is what one record is called; `options` are those of `table`. Returns what can be shared.
export function listRecords(page, title, noun, columns, records, options = {}) {
  fill(
    page,
    h(
      "div.wide",
      null,
      h(
        "div.wide-head",
        null,
        h("h1", null, title),
        h("span.quiet", null, many(records.length, noun)),
      ),
      h("div.scroll-x", null, table("table.figures.records", columns, records, options)),
    ),
  );
  return {
    shared: () => ({
      name: title.toLowerCase(),
      title,
      parts: [{ table: tableTexts(columns, records) }],
    }),
  };
}
