// What PyTorch asks of an accelerator outside the dispatcher.
#pragma once

namespace quartz {

void register_hooks();

}  // namespace quartz
