// Types that tsc needs beside the modules: what early.js leaves, and the vendored modules.

interface Window {
  /** The first request of the page: its address, and the answer that is on its way. */
  ramifyEarly: { address: string; answer: Promise<Response> } | null;
}
