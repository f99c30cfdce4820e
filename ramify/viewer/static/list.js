// A list of thousands of rows of equal height; only visible rows exist as elements.
//
//   box (scrolls) > space (as high as all rows) > visible rows, moved by transform and reused

import { h } from "./dom.js";

const BEYOND = 6; // extra rows above and below the visible ones

export class VirtualList {
  // make() creates the element of a row; show(element, index) fills it; pick(index, how) is called
  // on a click or Enter.
  constructor({ rowHeight, make, show, pick, label, role = "listbox", rowRole = "option" }) {
    this.rowHeight = rowHeight;
    this.make = make;
    this.show = show;
    this.pick = pick;
    this.rowRole = rowRole;
    this.onmove = null; // what the arrow keys do, if it is not what a click does
    this.length = 0;
    this.active = -1;
    this.space = h("div.vspace");
    this.box = h("div.vlist", { tabindex: "0", role, "aria-label": label }, this.space);
    this.free = [];
    this.rows = new Map(); // index -> element
    this.waiting = false;
    this.box.addEventListener("scroll", () => this.later(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.space.addEventListener("click", (event) => {
      const row = event.target.closest(".vrow");
      if (row) this.choose(Number(row.dataset.index), event);
    });
    this.sized = new ResizeObserver(() => this.later());
    this.sized.observe(this.box);
  }

  close() {
    this.sized.disconnect();
  }

  set(length) {
    this.length = length;
    this.space.style.height = `${length * this.rowHeight}px`;
    this.box.style.setProperty("--all-rows", this.space.style.height);
    this.draw(true);
  }

  setRowHeight(pixels) {
    this.rowHeight = pixels;
    for (const row of this.space.children) row.style.height = `${pixels}px`;
    for (const [index, row] of this.rows) row.style.transform = `translateY(${index * pixels}px)`;
    this.set(this.length);
  }

  later(all = false) {
    this.all = this.all || all;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw(this.all);
      this.all = false;
    });
  }

  draw(all) {
    const height = this.box.clientHeight || 400;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - BEYOND);
    const last = Math.min(
      this.length,
      Math.ceil((this.box.scrollTop + height) / this.rowHeight) + BEYOND,
    );
    for (const [index, row] of this.rows) {
      if (index < first || index >= last) {
        this.rows.delete(index);
        row.hidden = true;
        this.free.push(row);
      }
    }
    for (let index = first; index < last; index++) {
      let row = this.rows.get(index);
      if (row && !all) continue;
      if (!row) {
        row = this.free.pop() || this.fresh();
        row.hidden = false;
        row.style.transform = `translateY(${index * this.rowHeight}px)`;
        row.dataset.index = index;
        this.rows.set(index, row);
      }
      this.show(row, index);
      this.mark(row, index);
    }
  }

  fresh() {
    const row = this.make();
    row.classList.add("vrow");
    row.setAttribute("role", this.rowRole);
    row.style.height = `${this.rowHeight}px`;
    this.space.append(row);
    return row;
  }

  mark(row, index) {
    row.classList.toggle("active", index === this.active);
    row.setAttribute("aria-selected", index === this.active ? "true" : "false");
  }

  setActive(index, scroll = true) {
    this.active = index;
    for (const [each, row] of this.rows) this.mark(row, each);
    if (!scroll || index < 0) return;
    const top = index * this.rowHeight,
      bottom = top + this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = Math.max(0, top - 2 * this.rowHeight);
    else if (bottom > this.box.scrollTop + this.box.clientHeight)
      this.box.scrollTop = bottom - this.box.clientHeight + 2 * this.rowHeight;
  }

  choose(index, event) {
    if (index < 0 || index >= this.length) return;
    this.setActive(index);
    this.pick(index, event);
  }

  key(event) {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      j: 1,
      k: -1,
      PageDown: page,
      PageUp: -page,
      Home: -1e9,
      End: 1e9,
    };
    if (event.key in steps) {
      event.preventDefault();
      event.stopPropagation();
      const to = Math.min(this.length - 1, Math.max(0, this.active + steps[event.key]));
      if (this.onmove) this.onmove(to);
      else this.choose(to, event);
      this.setActive(to);
    } else if (event.key === "Enter") {
      event.stopPropagation();
      this.choose(Math.max(0, this.active), event);
    }
  }
}
