// Asks for the run that the address names while the page's modules are still on their way; api.js takes the answer.
// Not a module, and the server puts it into the page itself (answers.py), so that it runs at once.

{
  const key = /^#\/run\/([^/]+)/.exec(location.hash);
  if (key) {
    const address = `/api/run?${new URLSearchParams({ key: decodeURIComponent(key[1]), texts: 256 })}`;
    window.ramifyEarly = { address, answer: fetch(address) };
    window.ramifyEarly.answer.catch(() => {});
  }
}
