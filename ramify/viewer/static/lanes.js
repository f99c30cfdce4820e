// Where the bars of a picture lie: which lane of its band each call has, and how high the bands are.

// A heap of [order, value], smallest order first.
class Heap {
  constructor() {
    this.items = [];
  }
  get size() {
    return this.items.length;
  }
  peek() {
    return this.items[0];
  }
  push(item) {
    const items = this.items;
    let at = items.push(item) - 1;
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (items[up][0] <= items[at][0]) break;
      [items[up], items[at]] = [items[at], items[up]];
      at = up;
    }
  }
  pop() {
    const items = this.items, top = items[0], last = items.pop();
    if (items.length) {
      items[0] = last;
      let at = 0;
      for (;;) {
        const left = 2 * at + 1, right = left + 1;
        let least = at;
        if (left < items.length && items[left][0] < items[least][0]) least = left;
        if (right < items.length && items[right][0] < items[least][0]) least = right;
        if (least === at) break;
        [items[least], items[at]] = [items[at], items[least]];
        at = least;
      }
    }
    return top;
  }
}

// Which lane of its band each call lies in: the first that was free when it began. Band 2d holds the sessions of depth d,
// band 2d + 1 its plain calls.
export class Lanes {
  constructor() {
    this.of = [];     // call -> lane
    this.bands = [];  // band -> { num, free, ending, calls }
    this.ended = [];  // call -> whether its end is known here
  }
  update(calls) {
    for (let index = 0; index < calls.length; index++) {
      const call = calls[index];
      if (index < this.of.length) {
        if (!this.ended[index] && call.ended_s !== null) this.end(index, call);
        continue;
      }
      const band = (this.bands[bandOf(call)] ||= emptyBand());
      while (band.ending.size && band.ending.peek()[0] <= call.started_s) {
        const lane = band.ending.pop()[1];
        band.free.push([lane, lane]);
      }
      this.of.push(band.free.size ? band.free.pop()[1] : band.num++);
      this.ended.push(false);
      band.calls.push(index);
      if (call.ended_s !== null) this.end(index, call);
    }
    for (let band = 0; band < this.bands.length; band++) this.bands[band] ||= emptyBand();
  }
  end(index, call) {
    this.ended[index] = true;
    this.bands[bandOf(call)].ending.push([call.ended_s, this.of[index]]);
  }
}

export function bandOf(call) {
  return 2 * call.depth + (call.kind === "rlm" ? 0 : 1);
}

function emptyBand() {
  return { num: 0, free: new Heap(), ending: new Heap(), calls: [] };
}

// Heights of bands: what each wants where there is room for all, else its least and by weight a share of the rest.
export function shared(wanted, least, weights, room) {
  if (wanted.reduce((a, b) => a + b, 0) <= room) return wanted;
  const heights = least.map((each, index) => Math.min(each, wanted[index]));
  for (let round = 0; round < 6; round++) {
    const spare = room - heights.reduce((a, b) => a + b, 0);
    const open = wanted.map((each, index) => (heights[index] < each ? weights[index] : 0)), sum = open.reduce((a, b) => a + b, 0);
    if (spare < 1 || !sum) break;
    for (let index = 0; index < heights.length; index++) heights[index] = Math.min(wanted[index], heights[index] + (spare * open[index]) / sum);
  }
  return heights;
}
