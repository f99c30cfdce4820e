// Layout of the picture: the lane of each call in its band, and the height of the bands.

// A heap of numbers by order, smallest first. It uses two arrays of numbers to avoid objects.
class Heap {
  constructor() {
    this.orders = [];
    this.values = [];
  }
  get size() {
    return this.orders.length;
  }
  get least() {
    return this.orders[0];
  }
  push(order, value) {
    const { orders, values } = this;
    let at = orders.length;
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (orders[up] <= order) break;
      orders[at] = orders[up];
      values[at] = values[up];
      at = up;
    }
    orders[at] = order;
    values[at] = value;
  }
  pop() {
    const { orders, values } = this,
      top = values[0],
      order = orders.pop(),
      value = values.pop(),
      size = orders.length;
    for (let at = 0, below; size; at = below) {
      below = 2 * at + 1;
      if (below + 1 < size && orders[below + 1] < orders[below]) below++;
      if (below >= size || orders[below] >= order) {
        orders[at] = order;
        values[at] = value;
        break;
      }
      orders[at] = orders[below];
      values[at] = values[below];
    }
    return top;
  }
}

// Assigns each call the first lane of its band that is free when it begins. Band 2d holds the
// sessions of depth d; band 2d + 1 holds its plain calls.
export class Lanes {
  constructor(run) {
    this.run = run;
    this.of = []; // call -> lane
    this.bands = []; // band -> { num, free, ending, calls }
    this.ended = []; // call -> whether its end has been handled
  }
  update({ calls }) {
    for (let index = 0; index < calls.length; index++) {
      const call = calls[index];
      if (index < this.of.length) {
        if (!this.ended[index] && call.ended_s !== null) this.release(index, call);
        continue;
      }
      this.bands[this.bandOf(call)] ||= emptyBand();
      const band = this.bands[this.bandOf(call)];
      while (band.ending.size && band.ending.least <= call.started_s) {
        const lane = band.ending.pop();
        band.free.push(lane, lane);
      }
      this.of.push(band.free.size ? band.free.pop() : band.num++);
      this.ended.push(false);
      band.calls.push(index);
      if (call.ended_s !== null) this.release(index, call);
    }
    for (let band = 0; band < this.bands.length; band++) this.bands[band] ||= emptyBand();
  }
  release(index, call) {
    this.ended[index] = true;
    this.bands[this.bandOf(call)].ending.push(call.ended_s, this.of[index]);
  }
  bandOf(call) {
    return 2 * call.depth + (call.kind === "rlm" ? 0 : 1);
  }
  // Times at which a call begins and ends. One in progress ends now.
  edges(index) {
    const call = this.run.calls[index];
    return [call.started_s, call.ended_s ?? (this.run.alive ? this.end() : this.run.lastSeen())];
  }
  // The strip begins at the first call.
  start() {
    return this.run.calls.length ? this.run.calls[0].started_s : 0;
  }
  end() {
    return Math.max(this.run.now(), this.start() + 0.001);
  }
  axisWords(at, step) {
    if (step >= 1)
      return at >= 120
        ? `${Math.floor(at / 60)}m${at % 60 ? ` ${Math.round(at % 60)}s` : ""}`
        : `${Math.round(at)} s`;
    if (step >= 0.1 || at >= 1) return `${Number(at.toFixed(3))} s`;
    if (step >= 0.001) return `${Math.round(at * 1000)} ms`;
    return `${Math.round(at * 1e6)} µs`;
  }
}

function emptyBand() {
  return { num: 0, free: new Heap(), ending: new Heap(), calls: [] };
}

// Heights of the bands: the wanted heights if all fit, else the minimum plus a weighted share.
export function shared(wanted, least, weights, room) {
  if (wanted.reduce((a, b) => a + b, 0) <= room) return wanted;
  const heights = least.map((each, index) => Math.min(each, wanted[index]));
  for (let round = 0; round < 6; round++) {
    const spare = room - heights.reduce((a, b) => a + b, 0);
    const open = wanted.map((each, index) => (heights[index] < each ? weights[index] : 0)),
      sum = open.reduce((a, b) => a + b, 0);
    if (spare < 1 || !sum) break;
    for (let index = 0; index < heights.length; index++)
      heights[index] = Math.min(wanted[index], heights[index] + (spare * open[index]) / sum);
  }
  return heights;
}
