// What calls can be ordered and coloured by: their cost, time and tokens, and the picture's layout in
// which a bar is as wide as what a call and those below it used, the largest first.
//
//   depth 0   |=============== $0.031 ===============|   a call with all below it
//   depth 1   |=== 0.7 ===|== 0.2 ==|= … |

import { count, dollars, seconds } from "./format.js";

// Field of the filter -> what it is of a call, and how it is written.
export const MEASURES = {
  cost: { words: "cost", of: (call) => call.cost, shown: dollars, adds: true },
  seconds: {
    words: "time",
    of: (call, now) => (call.ended_s ?? now) - call.started_s,
    shown: seconds,
    adds: false, // children run at the same time as their parent
  },
  tokens: {
    words: "tokens",
    of: (call) => call.tokens_in + call.tokens_out,
    shown: count,
    adds: true,
  },
};

// Has the form of Lanes: a band for each depth, with one lane.
export class MeasuredSpans {
  constructor(field) {
    this.measure = MEASURES[field];
    this.bands = [];
    this.of = []; // call -> lane
    this.from = []; // call -> left and right edge, in the unit of the measure
    this.to = [];
    this.total = 0;
    this.ranks = []; // call -> place among its siblings when it was first seen
  }

  // Siblings keep their order, so that bars of a run in progress do not change places.
  update(run) {
    const { of } = this.measure,
      { calls } = run,
      now = run.now(),
      own = calls.map((call) => Math.max(0, of(call, now) || 0)),
      below = calls.map(() => 0),
      children = new Map();
    for (let index = calls.length - 1; index >= 0; index--) {
      const parent = calls[index].parent;
      if (parent >= 0) below[parent] += this.whole(own[index], below[index]);
      if (children.has(parent)) children.get(parent).push(index);
      else children.set(parent, [index]);
    }
    const size = (index) => this.whole(own[index], below[index]);
    for (const siblings of children.values()) {
      siblings.sort(
        (a, b) =>
          (this.ranks[a] ?? Infinity) - (this.ranks[b] ?? Infinity) || size(b) - size(a) || a - b,
      );
      siblings.forEach((index, rank) => {
        this.ranks[index] = rank;
      });
    }
    this.bands = [];
    let right = 0;
    const place = (index, left) => {
      this.from[index] = left;
      this.to[index] = left + size(index);
      this.of[index] = 0;
      const band = 2 * calls[index].depth;
      this.bands[band] ||= emptySpanBand();
      this.bands[band].num = 1;
      this.bands[band].calls.push(index);
    };
    const stack = [];
    for (const index of children.get(-1) || []) {
      place(index, right);
      right += size(index);
      stack.push(index);
    }
    while (stack.length) {
      const index = stack.pop();
      let left = this.from[index];
      for (const child of children.get(index) || []) {
        place(child, left);
        left += size(child);
        stack.push(child);
      }
    }
    this.total = right;
    for (let band = 0; band < this.bands.length || band % 2; band++)
      this.bands[band] ||= emptySpanBand();
  }

  // What a call used with all below it.
  whole(own, below) {
    return this.measure.adds ? own + below : Math.max(own, below);
  }

  bandOf(call) {
    return 2 * call.depth;
  }

  edges(index) {
    return [this.from[index], this.to[index]];
  }

  start() {
    return 0;
  }

  end() {
    return Math.max(this.total, 1e-9);
  }

  axisWords(at) {
    return this.measure.shown(at);
  }
}

function emptySpanBand() {
  return { num: 0, calls: [] };
}
