// Grammars of the languages, apart from Python, in which models write blocks of code.

import { optional } from "./api.js";
import { registerGrammars } from "./code.js";
import bashGrammar from "./vendor/highlight-bash.js";
import javascriptGrammar from "./vendor/highlight-javascript.js";
import jsonGrammar from "./vendor/highlight-json.js";
import sqlGrammar from "./vendor/highlight-sql.js";
import xmlGrammar from "./vendor/highlight-xml.js";

registerGrammars({
  bash: bashGrammar,
  javascript: javascriptGrammar,
  json: jsonGrammar,
  sql: sqlGrammar,
  xml: xmlGrammar,
});
optional.languages = true;
