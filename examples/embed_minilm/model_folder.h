#pragma once

#include <tessera/checkpoint/state_dict.h>

#include <functional>
#include <string>

#include "embed_minilm/bert.h"
#include "embed_minilm/tokenizer.h"

namespace minilm {

/// A Hugging Face folder with a BERT model: config.json, vocab.txt and model.safetensors, and what else lies there.
class ModelFolder {
 public:
  /// An error that names the folder and the file for one that is missing. Reads nothing yet.
  explicit ModelFolder(std::string folder);

  const std::string& path() const { return folder_; }
  BertConfig config() const;
  /// An error where the vocabulary is not as large as `config` says.
  Tokenizer tokenizer(const BertConfig& config) const;

  /// Reads the weights into the module's parameters with the same names; `filter` is true for the names to read. An error for
  /// weights that the module does not have, except those that `rest` returns. Every rank calls it.
  void load(const torch::nn::Module& model, const std::function<bool(const std::string&)>& filter = nullptr) const;
  /// What the file holds and `Bert` does without: the pooler's weights and the numbers of the positions. Every rank calls it.
  tessera::StateDict rest() const;

  /// Copies config.json and vocab.txt into `folder`, or all files but the weights. Local.
  void copy_config(const std::string& folder) const;
  void copy_all_but_weights(const std::string& folder) const;

 private:
  std::string file(const char* name) const;

  std::string folder_;
};

} // namespace minilm
