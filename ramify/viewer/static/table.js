// A table of plain values: its columns say what is in a cell. Lists of thousands of rows are no
// tables (see list.js).

import { h } from "./dom.js";

/**
 * @typedef {object} Column
 * @property {any} name text or elements at the head
 * @property {(row: any, index: number) => any} cell text or elements
 * @property {boolean} [isNumber] numbers stand at the right
 * @property {boolean} [isHead] the cells name their rows
 * @property {(row: any) => string} [tone] classes of a cell
 * @property {(row: any) => object} [style] style properties of a cell
 */

/**
 * @param {string} what the element with its classes, such as "table.figures"
 * @param {Column[]} columns
 * @param {any[]} rows
 * @param {{ label?: string, problem?: (row: any) => string }} options a row with a problem shows it
 *   instead of all cells but the first
 */
export function table(what, columns, rows, { label = null, problem = () => "" } = {}) {
  return h(
    what,
    { "aria-label": label },
    h("thead", null, h("tr", null, columns.map(headCell))),
    h(
      "tbody",
      null,
      rows.map((row, index) => {
        const words = problem(row),
          shown = words ? columns.slice(0, 1) : columns;
        return h(
          "tr",
          null,
          shown.map((column) => bodyCell(column, row, index)),
          words
            ? h("td", { colspan: String(columns.length - 1) }, h("span.bad", null, words))
            : null,
        );
      }),
    ),
  );
}

// The texts of a table, to be shared (share.js).
/** @param {Column[]} columns @param {any[]} rows */
export function tableTexts(columns, rows) {
  const wordsOf = (cell) => h("div", null, cell).textContent;
  return {
    head: columns.map((column) => wordsOf(column.name)),
    rows: rows.map((row, index) => columns.map((column) => wordsOf(column.cell(row, index)))),
  };
}

/** @param {Column} column */
function headCell({ name, isNumber }) {
  return name ? h("th", { scope: "col", class: isNumber ? "num" : "" }, name) : h("td");
}

/** @param {Column} column */
function bodyCell({ cell, isNumber, isHead, tone, style }, row, index) {
  const classes = `${isNumber ? "num" : ""} ${tone ? tone(row) : ""}`,
    properties = { class: classes, style: style ? style(row) : null };
  return isHead
    ? h("th", { ...properties, scope: "row" }, cell(row, index))
    : h("td", properties, cell(row, index));
}
