#pragma once

// Internal: the steps of a save into a storage.

#include <functional>
#include <string>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/save/writer.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/checkpoint/storage.h>

namespace tessera::internal {

/// A save in progress, as SaveSession is for a folder: data objects first, the index last, so that a checkpoint without its index
/// does not exist. Every rank makes it and calls its functions in the same order. When it is destroyed without a commit, each
/// rank removes the objects that it wrote.
class StorageSave {
 public:
  /// Every rank runs `prepare`. All learn the token that begins the names of this save's data objects: those of a checkpoint that
  /// is replaced, and of a save that was killed, have other names.
  StorageSave(const Ranks& ranks, checkpoint::Storage& storage, std::string name, const checkpoint::SaveOptions& options,
              const Prepare& prepare);
  StorageSave(const StorageSave&) = delete;
  StorageSave& operator=(const StorageSave&) = delete;
  ~StorageSave();

  const Ranks& ranks() const { return ranks_; }
  /// `Ranks::all` with a step that names the checkpoint.
  template <typename Work>
  auto all(const std::string& verb, const Work& work) const {
    return ranks_.all(verb + " " + name_, work);
  }
  /// This rank's new data objects.
  NewFiles new_files();
  /// Microseconds since 1970, later than those of a checkpoint that is replaced. Rank 0's.
  int64_t time() const { return time_; }
  /// Rank 0 writes the index that `encode` gives, then removes what lies there of older saves. Where it is not known whether the
  /// index is there, the data stays for the next save of the name to remove.
  void commit(const std::function<std::string()>& encode);

 private:
  std::string object(const std::string& file) const { return name_ + "/" + file; }
  void start();
  /// `may_be_there`: whether the index may lie there, where this throws.
  void put_index(const std::string& text, bool& may_be_there);
  std::string try_to_put_index(const std::function<std::string()>& encode);

  const Ranks& ranks_;
  checkpoint::Storage& storage_;
  std::string name_;
  checkpoint::SaveOptions options_;
  std::string token_;
  int64_t time_ = 0;
  bool replaces_ = false;
  bool keeps_data_ = false;       ///< an index may name it
  std::vector<std::string> made_; ///< this rank's objects
};

} // namespace tessera::internal
