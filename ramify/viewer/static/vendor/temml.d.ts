declare const temml: { render(source: string, place: HTMLElement, options: object): void };
export default temml;
