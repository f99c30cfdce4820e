export interface Scope {
  scope?: string;
  children: (Scope | string)[];
}

declare const hljs: {
  registerLanguage(name: string, language: unknown): void;
  getLanguage(name: string): unknown;
  highlight(
    code: string,
    options: { language: string; ignoreIllegals: boolean },
  ): { _emitter: { rootNode: Scope } };
};
export default hljs;
