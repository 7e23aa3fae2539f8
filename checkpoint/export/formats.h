#pragma once

// Internal: the formats that a save can write, from a plan and this rank's parts of it.

#include <vector>

#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/save/storage_save.h>
#include <tessera/checkpoint/save/writer.h>

namespace tessera::checkpoint {
struct HuggingFaceOptions;
}

namespace tessera::internal {

/// Our format: parts, and an index with checksums. Every rank calls it.
void write_tessera(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts);

/// Writes it into a storage.
void write_tessera(StorageSave& session, const SavePlan& plan, const std::vector<OwnedPart>& parts);

/// The parts alone, as PyTorch's HuggingFaceStorageWriter writes them. Every rank calls it. Values are not written.
void write_distributed(SaveSession& session, const std::vector<OwnedPart>& parts);

/// Whole tensors in files common to all ranks. Every rank calls it. Values are not written.
void write_hugging_face(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts,
                        const checkpoint::HuggingFaceOptions& options);

} // namespace tessera::internal
