declare const python: unknown;
export default python;
