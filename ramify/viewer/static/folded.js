// A text that is cut after a whole row, also if it is formatted, with a button that shows all of it.

import { h } from "./dom.js";

export class FoldedText {
  // `share`: the part of the window's height that may be filled; `least`: pixels that always may.
  constructor(element, { share, least, label }) {
    this.element = element;
    this.share = share;
    this.least = least;
    this.isOpen = false;
    this.button = h(
      "button.unfold.all",
      {
        type: "button",
        hidden: true,
        "aria-expanded": "false",
        "aria-label": `show all of the ${label}`,
        onclick: () => this.toggle(),
      },
      "… show all",
    );
    this.width = 0;
    this.sized = new ResizeObserver(() => {
      if (element.clientWidth !== this.width) this.fold();
    });
    this.sized.observe(element);
  }

  close() {
    this.sized.disconnect();
  }

  toggle() {
    this.isOpen = !this.isOpen;
    this.button.setAttribute("aria-expanded", String(this.isOpen));
    this.button.textContent = this.isOpen ? "show less" : "… show all";
    this.fold();
  }

  // Call it when the text has changed.
  fold() {
    const { element } = this,
      limit = Math.max(this.least, Math.round(this.share * innerHeight));
    this.width = element.clientWidth;
    element.classList.remove("cut", "open");
    element.style.maxHeight = "";
    const isLong = element.scrollHeight > limit + 1;
    this.button.hidden = !isLong;
    element.classList.toggle("open", isLong && this.isOpen);
    if (!isLong || this.isOpen) return;
    element.style.maxHeight = `${wholeRows(element, limit)}px`;
    element.classList.add("cut");
  }
}

// The height of the rows of an element that end before `limit` pixels.
export function wholeRows(element, limit) {
  const top = element.getBoundingClientRect().top,
    walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT),
    range = document.createRange(),
    rows = [];
  let isPast = false;
  while (!isPast && walker.nextNode()) {
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) {
      rows.push([box.top - top, box.bottom - top]);
      isPast ||= box.top - top > limit;
    }
  }
  const ends = rows.map(([, bottom]) => bottom).filter((bottom) => bottom <= limit);
  const whole = ends.filter(
    (end) => !rows.some(([start, bottom]) => start < end - 2 && bottom > end + 2),
  );
  return Math.ceil(Math.max(0, ...whole)) || limit;
}
