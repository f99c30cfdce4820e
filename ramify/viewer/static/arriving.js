// The reply that the open turn waits for, as far as it has arrived. One element is kept and moved,
// so that its scroll position and selection stay. Text that has been shown stays until there is
// newer text or the recorded reply, because the file of arriving replies forgets it a moment
// earlier.

import { h } from "./dom.js";

export class ArrivingReply {
  constructor() {
    this.thought = h("span.thought");
    this.text = h("span");
    this.element = h(
      "div.said.arriving",
      { tabindex: "0", role: "region", "aria-label": "reply so far", hidden: true },
      this.thought,
      this.text,
    );
    this.replies = []; // of all calls of the run
    this.place = ""; // call and turn that are shown
  }

  take(replies) {
    this.replies = replies;
  }

  // Show what has arrived of the reply to this turn of a call.
  show(call, turn) {
    const place = `${call}/${turn}`,
      reply = this.replies.find((each) => each.call === call && each.turn === turn);
    if (place !== this.place) this.leave();
    this.place = place;
    if (!reply) return;
    const box = this.element,
      isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    this.element.hidden = false;
    write(this.thought, reply.reasoning && `${reply.is_cut ? "… " : ""}${reply.reasoning}\n\n`);
    write(this.text, reply.is_cut && !reply.reasoning ? `… ${reply.text}` : reply.text);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  leave() {
    this.place = "";
    this.element.hidden = true;
    write(this.thought, "");
    write(this.text, "");
  }
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
