// Requests the run or the list of runs in the address while the page's modules are still loading;
// api.js uses the answer. It is not a module: the server puts it into the page itself
// (view_server.py), so that it runs at once.

{
  const key = /^#\/run\/([^/]+)/.exec(location.hash),
    isList = /^(#\/?|#\/runs(\/.*)?)?$/.test(location.hash);
  if (key || isList) {
    const address = key
      ? `/api/run?${new URLSearchParams({ key: decodeURIComponent(key[1]), texts: "256" })}`
      : "/api/runs/changes?since=";
    window.ramifyEarly = { address, answer: fetch(address) };
    window.ramifyEarly.answer.catch(() => {});
  }
}
