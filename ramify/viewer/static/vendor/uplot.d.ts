/** A plot on a canvas: as much of it as plots.js uses. */
export default class uPlot {
  constructor(options: object, data: (number | null)[][], holder: HTMLElement);
  readonly over: HTMLElement;
  readonly ctx: CanvasRenderingContext2D;
  readonly bbox: { left: number; top: number; width: number; height: number };
  readonly cursor: { idx: number | null; left: number };
  readonly data: (number | null)[][];
  readonly width: number;
  setData(data: (number | null)[][]): void;
  setSize(size: { width: number; height: number }): void;
  valToPos(value: number, scale: string, isCanvas?: boolean): number;
  destroy(): void;
}
