// Embeds sentences with the pretrained all-MiniLM-L6-v2, its parameters sharded over ranks, or fine-tunes it on pairs of
// sentences.
//
//   scripts/setup --minilm                                               gets the model
//   embed_minilm --ranks 4
//   embed_minilm --ranks 4 --pairs examples/embed_minilm/pairs.tsv
#include <fmt/format.h>
#include <tessera/collectives/process_context.h>

#include "common/memory.h"
#include "common/program.h"
#include "common/ranks.h"
#include "embed_minilm/embedding.h"
#include "embed_minilm/fine_tuning.h"
#include "embed_minilm/options.h"

namespace {

void run(const minilm::Options& options) {
  examples::join_job(options.threads);
  minilm::SentenceEncoder encoder(options);
  const auto bytes = examples::max_over_ranks({static_cast<double>(examples::state_bytes(*encoder.model()))})[0];
  if (examples::rank() == 0) {
    fmt::print("{} parameters on {} rank{}, strategy {}: {:.3f} MB a rank\n", examples::parameter_count(*encoder.model()),
               examples::world_size(), examples::world_size() == 1 ? "" : "s", examples::to_string(options.strategy),
               bytes / 1e6);
  }
  options.pairs.empty() ? minilm::embed_sentences(encoder, options) : minilm::fine_tune(encoder, options);
  tessera::destroy_process_group();
}

int start(int argc, char** argv) {
  const auto options = minilm::parse_options(argc, argv);
  if (options.ranks > 0) minilm::check_world(options, options.ranks);
  return examples::run_ranks(options.ranks, [&] { run(options); });
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("embed_minilm", [&] { return start(argc, argv); });
}
