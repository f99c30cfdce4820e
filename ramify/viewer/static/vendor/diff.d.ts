export interface Part {
  value: string;
  added?: boolean;
  removed?: boolean;
}

export default class Diff {
  tokenize(text: string): string[];
  /** Undefined if the limit of time was reached. */
  diff(left: string, right: string, options: { timeout: number }): Part[] | undefined;
}
