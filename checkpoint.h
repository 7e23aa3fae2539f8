#pragma once

/// State dicts, and checkpoints in files: what torch.distributed.checkpoint is in Python.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/communication_state.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/checkpoint/script_file.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/checkpoint/storage.h>
#include <tessera/checkpoint/torch_file.h>
