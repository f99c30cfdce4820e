declare const grammar: unknown;
export default grammar;
