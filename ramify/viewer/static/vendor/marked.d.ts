/** A node of the tree; which fields it has depends on its type. */
// biome-ignore lint/suspicious/noExplicitAny: 20 kinds of tokens
export type Token = any;

export class Marked {
  constructor(options: object);
  lexer(text: string): Token[];
}
